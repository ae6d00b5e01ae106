"""The values that travel between the stages. This module imports nothing of qlacompile but the error codes.

roll       -> Loop                      one rolled Python loop, as data
recognise  -> Candidate (in patterns)   which node plays which role
rewrite    -> Spec                      what the fused operator has to compute: the hinge between patterns and kernels
lower      -> Choice                    which kernel runs it, and why the others do not
everybody  -> Refusal, Match            what is told to the user
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .errors import CODES


@dataclass(frozen=True)
class Refusal:
    """Why something was not done. ``source`` is ``file.py:line`` of the user's code where it is known."""

    code: str
    reason: str
    source: str = ""
    nearest_family: str | None = None
    stage: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"{self.code} is not a code of qlacompile.errors.CODES")

    def __str__(self) -> str:
        near = f" (nearest family: {self.nearest_family})" if self.nearest_family else ""
        where = f" at {self.source}" if self.source else ""
        return f"{self.code}{where}: {self.reason}{near}"


@dataclass(frozen=True)
class Proof:
    """Evidence that a region computes what its Spec says: the largest relative error over float64 trials."""

    error: float
    trials: int
    method: str
    statement: str = ""


@dataclass(frozen=True)
class Spec:
    """What a fused operator is asked to compute. Sizes are of the operator's own arguments.

    ``q``, ``k``: ``[batch, seq_len, k_heads, key_dim]``; ``v``: ``[batch, seq_len, v_heads, value_dim]``;
    ``g`` (log decay) and ``beta``: ``[batch, seq_len, v_heads]``; state: ``[sequences, v_heads, key_dim, value_dim]``.
    ``dtype`` is that of q, k and v, ``state_dtype`` that of the initial state (float32 if there is none).
    """

    family: str
    form: str  # "token" | "chunk" | "step" | "scan" | "direct" (called through qlacompile.ops)
    batch: int
    seq_len: int
    k_heads: int
    v_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    state_dtype: torch.dtype = torch.float32
    has_gate: bool = True
    has_beta: bool = True
    has_initial_state: bool = False
    packed: bool = False
    qk_l2norm: bool = False
    needs_grad: bool = False
    deterministic: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Choice:
    """The kernel that ``lower`` chose, and ``(kernel, code, reason)`` for each one that it did not."""

    kernel: str
    refusals: tuple[tuple[str, str, str], ...] = ()


class Kernel(Protocol):
    """One way to run a family. Found by discovery: a folder in ``kernels/`` that defines ``KERNELS``, a list of these.

    ``version`` is part of the operator's cache key: raise it whenever results can change.
    """

    name: str
    family: str
    version: int
    priority: int  # the largest one that supports the Spec wins

    def supports(self, spec: Spec) -> tuple[str, str] | None:
        """``None`` if this kernel can run ``spec``, else ``(code, reason)``; must not build or launch anything."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the family's forward. The signature is the family's, see ``kernels/README.md``."""

    def backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """Run the family's backward; a gradient that was not asked for is ``None``."""


@dataclass(frozen=True)
class Match:
    """One region that was replaced by a fused operator."""

    family: str
    form: str
    steps: int
    source: str
    roles: dict[str, str]
    kernel: str
    kernel_refusals: tuple[tuple[str, str, str], ...]
    absorbed: tuple[str, ...]
    proof: Proof
    scale: float = 1.0


# --- rolled loops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """A value inside a loop body.

    kind "node": the result of body instruction ``index``; "carry": the value that the previous iteration left in
    carry ``index``; "inv": argument ``index`` of the loop that no iteration rebinds; "int": ``ints[index]``, an integer
    that is affine in the iteration (see :class:`Loop`).
    """

    kind: str
    index: int


@dataclass(frozen=True)
class Instr:
    """One operation of a loop body. ``op`` is "call_function" or "call_method"; leaves of args/kwargs are Refs or
    constants.

    ``dtype`` is that of its result in the traced program, if that is a tensor.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    source: str = field(default="", compare=False)
    dtype: torch.dtype | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Loop:
    """A rolled loop. Calling it is its meaning: it runs the body ``steps`` times.

    Integer leaves of the body are kept outside of it, as ``(base, slope)`` pairs with value ``base + slope * i`` in
    iteration ``i = 0 .. steps-1``; so two loops that differ in integers only have equal bodies.

    ``loop(carries, invs, bases)`` returns the tuple
    (last value of each ``lasts``) + (stack along a new dim 0 of each ``stacks``); invariants that the body writes
    to (``writes``) are changed in place, as the Python loop would have done.
    """

    body: tuple[Instr, ...]
    steps: int
    carry_out: tuple[Ref, ...]
    lasts: tuple[Ref, ...]
    stacks: tuple[Ref, ...]
    slopes: tuple[int, ...]
    writes: tuple[int, ...] = ()  # indices of invariants that the body mutates
    source: str = field(default="", compare=False)
    name: str = field(default="rolled_loop", compare=False)

    # FX prints a call_function target by its __module__ and __name__
    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, carries: Sequence[Any], invs: Sequence[Any], bases: Sequence[int]) -> tuple[Any, ...]:
        return self.run(carries, invs, bases)

    def run(
        self,
        carries: Sequence[Any],
        invs: Sequence[Any],
        bases: Sequence[int],
        call: Callable[[Instr, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> tuple[Any, ...]:
        """The loop's meaning; ``call`` may stand in for executing an instruction."""
        current = list(carries)
        stacks: list[list[Any]] = [[] for _ in self.stacks]
        env: dict[Ref, Any] = {Ref("inv", j): value for j, value in enumerate(invs)}
        for i in range(self.steps):
            self.run_step(env, current, bases, i, call)
            for stack, ref in zip(stacks, self.stacks):
                stack.append(env[ref])
            current = [env[ref] for ref in self.carry_out]
        return tuple(env[ref] for ref in self.lasts) + tuple(torch.stack(s) for s in stacks)

    def run_step(
        self,
        env: dict[Ref, Any],
        carries: Sequence[Any],
        bases: Sequence[int],
        i: int,
        call: Callable[[Instr, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        """Run iteration ``i`` in ``env``, which already holds the invariants; results are left in ``env``."""
        run = call or call_instr
        for j, value in enumerate(carries):
            env[Ref("carry", j)] = value
        for j, (base, slope) in enumerate(zip(bases, self.slopes)):
            env[Ref("int", j)] = base + slope * i
        for j, instr in enumerate(self.body):
            args = resolve(instr.args, env.__getitem__)
            kwargs = {key: resolve(value, env.__getitem__) for key, value in instr.kwargs}
            env[Ref("node", j)] = run(instr, args, kwargs)


def call_instr(instr: Instr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute one instruction on real values."""
    if instr.op == "call_method":
        return getattr(args[0], instr.target)(*args[1:], **kwargs)
    return instr.target(*args, **kwargs)


def resolve(value: Any, lookup: Callable[[Ref], Any]) -> Any:
    """Replace every Ref in a nested argument by ``lookup(ref)``."""
    if isinstance(value, Ref):
        return lookup(value)
    if isinstance(value, (tuple, list)):
        items = [resolve(v, lookup) for v in value]
        return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)
    if isinstance(value, slice):
        return slice(resolve(value.start, lookup), resolve(value.stop, lookup), resolve(value.step, lookup))
    if isinstance(value, dict):
        return {k: resolve(v, lookup) for k, v in value.items()}
    return value


def refs_in(value: Any) -> list[Ref]:
    """All Refs in a nested argument, in order."""
    found: list[Ref] = []

    def note(ref: Ref) -> Ref:
        found.append(ref)
        return ref

    resolve(value, note)
    return found


# --- what a pattern sees, and what it says ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A candidate for a role: ``key`` names it for the caller; ``data`` holds its float64 value in this trial."""

    key: Any
    data: torch.Tensor


class StepView(Protocol):
    """One loop step as a function of its state. A trial fixes random float64 data for everything else.

    ``state_shape``: the shape of the state; ``outputs``: how many per-step outputs there are.
    """

    state_shape: tuple[int, ...]
    outputs: int

    def run(self, state: torch.Tensor, trial: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The next state and the outputs of one step from ``state``."""

    def values(self, trial: int) -> list[Value]:
        """The values of the step that do not depend on the state, those nearest to the inputs first."""


@dataclass(frozen=True)
class StepMatch:
    """A step is the family's: which value plays which role (a key of :class:`Value`), and how the state is laid out.

    ``gate`` says how the decay follows from the role "g": "log" (exp g), "log2" (2**g), "linear" (g itself), "none".
    """

    family: str
    key_axis: int
    value_axis: int
    roles: dict[str, Any]
    gate: str
    scale: float
    output: int | None
    error: float


@dataclass(frozen=True)
class SequenceView:
    """A whole region: candidates for inputs and outputs, each a node with its float64 value in the search trial.

    ``inputs`` and ``outputs`` are in graph order; the initial state is zero in this trial.
    """

    inputs: list[Value]
    outputs: list[Value]


@dataclass(frozen=True)
class Placement:
    """A node as a role: ``key`` of its Value, and the positions of batch, time and head in its shape (None: absent)."""

    key: Any
    batch: int | None
    time: int
    head: int | None


@dataclass(frozen=True)
class SequenceMatch:
    """A region is the family's: see :class:`StepMatch`; placements say how each node is laid out."""

    family: str
    roles: dict[str, Placement]
    output: Placement
    gate: str
    scale: float
    key_dim: int
    value_dim: int


class Pattern(Protocol):
    """What a family is. Found by discovery: a module in ``patterns/`` that defines ``PATTERN``."""

    family: str

    def statement(self, gate: str, has_beta: bool, scale: float) -> str:
        """What a match with this gate, with or without beta, computes, as a formula for the report."""

    def match_step(self, view: StepView) -> StepMatch | Refusal:
        """The roles of a loop step, or the first condition that fails."""

    def match_sequence(self, view: SequenceView) -> SequenceMatch | Refusal:
        """The roles of a region over whole sequences, or the first condition that fails."""
