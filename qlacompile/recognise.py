"""Find the recurrences of a graph: loops and regions become views, patterns name the roles, the result says where
they are."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from .access import Unfit
from .core import core
from .evaluate import is_float
from .functional import Functional, WritingLoop
from .fxtools import body_writes
from .inline import inline
from .ir import Loop, Pattern, Placement, Proof, Ref, Refusal, SequenceMatch, StepMatch
from .regions import Region, anchors, cut, evaluate, loop_of, memory_limit, start_hypotheses, view
from .roll.compare import source_of
from .steps import LoopStep

INLINE_ROUNDS = 4


@dataclass
class Found:
    """One recognised recurrence, in terms of the functional graph.

    ``roles`` maps "q", "k", "v", "g", "beta" to a Placement (whose key is a node) or to a Ref of ``step``'s loop body;
    ``state_in`` is the initial state's node (None: zero); ``output`` and ``state_out`` are where the results appear.
    """

    family: str
    form: str
    steps: int
    source: str
    anchor: fx.Node
    roles: dict[str, Any]
    gate: str
    scale: float
    state_in: fx.Node | None
    state_axes: tuple[int, int]  # of the final state: where its key and value axes are
    output: Placement | tuple[str, Any] | None
    state_in_axes: tuple[int, int] | None = None  # of the initial state, where they differ
    state_out: list[fx.Node] = field(default_factory=list)
    core: list[fx.Node] = field(default_factory=list)
    step: LoopStep | None = None
    match: StepMatch | SequenceMatch | None = None
    region: Region | None = None
    proof: Proof | None = None
    absorbed: list[str] = field(default_factory=list)


@cache
def patterns() -> tuple[Pattern, ...]:
    """All families, found in the folder patterns/."""
    import qlacompile.patterns as package

    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    return tuple(p for m in modules if (p := getattr(m, "PATTERN", None)) is not None)


def recognise(
    functional: Functional, device: torch.device, refused: Set[str] = frozenset()
) -> Iterator[Found | Refusal]:
    """Every recurrence of the graph in order, or why a loop is none. A result's outputs bound what comes after it.

    Anchors that are copies of nodes of the source graph named in ``refused`` are passed over.
    """
    closed: set[fx.Node] = set()
    done: set[fx.Node] = set()
    for anchor in anchors(functional.graph):
        if anchor in done or functional.origin[anchor].name in refused:
            continue
        result: Found | Refusal | None = None
        loop = loop_of(anchor)
        if anchor in functional.opaque:
            if loop is not None and loop.carry_out:
                yield Refusal("QLA302", "the loop writes to memory that is also reachable otherwise", loop.source)
            continue
        if loop is not None and (loop.carry_out or loop.writes):
            result = _as_step(functional, anchor, loop)
            if isinstance(result, Refusal) and not _may_be_chunk(loop):
                yield result
                continue
        if not isinstance(result, Found):
            sequence = _as_sequence(functional, anchor, closed, device)
            # a solve or a loop without state that leads nowhere is not a recurrence that was missed
            if isinstance(sequence, Found):
                result = sequence
            elif result is None or (sequence is not None and sequence.code not in ("QLA201", "QLA206")):
                result = sequence if loop is not None and loop.carry_out else None
        if isinstance(result, Found):
            done |= set(result.core)
            closed |= {n for n in (getattr(result.output, "key", None), *result.state_out) if isinstance(n, fx.Node)}
        if result is not None:
            yield result


def _may_be_chunk(loop: Loop) -> bool:
    """Whether a loop's body has the matrix products of a chunked form."""
    from .evaluate import op_name

    return not loop.carry_out or any(op_name(i.target) in ("matmul", "bmm", "einsum", "baddbmm") for i in loop.body)


# --- a loop over tokens -----------------------------------------------------------------------------------------------


def _as_step(functional: Functional, anchor: fx.Node, loop: Loop) -> Found | Refusal:
    carries, invs, bases = anchor.args
    anchor_loop = loop

    def example(value: Any) -> Any:
        value = value.meta.get("example_value") if isinstance(value, fx.Node) else value
        return _static(value) if isinstance(value, torch.Tensor) else value

    if _writes_to_start(functional, anchor, loop):
        return Refusal(
            "QLA302", "the loop changes what it starts from in place, and that is used elsewhere", loop.source
        )
    nodes = list(invs)
    fixed = set(functional.versions) | functional.opaque
    refusal: Refusal | None = None
    try:
        for _ in range(INLINE_ROUNDS):
            step = LoopStep(loop, [example(c) for c in carries], [example(i) for i in nodes], list(bases))
            for pattern in patterns():
                match = pattern.match_step(step)
                if isinstance(match, StepMatch):
                    return _found_step(anchor, anchor_loop, step, nodes, match)
                refusal = refusal or Refusal(
                    match.code, match.reason, match.source or loop.source, match.nearest_family, "recognise"
                )
            # the roles may show only behind what was computed for all steps in front of the loop
            inlined = inline(step, nodes, fixed)
            if inlined is None:
                break
            loop, nodes = inlined
    except Unfit as e:
        return refusal or e.refusal
    except Exception as e:  # an operation that does not run on other data: nothing is proven, the loop stays
        return refusal or Refusal("QLA208", f"one step can not be evaluated ({type(e).__name__}: {e})", loop.source)
    assert refusal is not None
    return refusal


def _writes_to_start(functional: Functional, anchor: fx.Node, loop: Loop) -> bool:
    """Whether the first step writes to memory that something besides the loop can see."""
    _, written = body_writes(loop.body)
    for j in written:
        start = anchor.args[0][j]
        node = functional.versions.get(start) or functional.origin[start]
        others = [n for n, found in functional.roots.items() if found & functional.roots[node] and n is not node]
        if others or len(node.users) > 1 or node.op == "placeholder":
            return True
    return False


def _static(value: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the value's size now; patterns work on numbers."""
    from .evaluate import hint

    return torch.empty(tuple(map(hint, value.shape)), dtype=value.dtype, device="meta")


def _found_step(anchor: fx.Node, loop: Loop, step: LoopStep, nodes: list[fx.Node], match: StepMatch) -> Found | Refusal:
    step.nodes = nodes
    step.axes = (match.key_axis, match.value_axis)
    state_in = anchor.args[0][step.state.index] if step.state.kind == "carry" else anchor.args[1][step.state.index]
    new_state = loop.carry_out[step.state.index] if step.state.kind == "carry" else None
    found = Found(
        match.family,
        "token",
        loop.steps,
        loop.source,
        anchor,
        dict(match.roles),
        match.gate,
        match.scale,
        state_in,
        (match.key_axis, match.value_axis),
        step.output_where[match.output] if match.output is not None else None,
        core=[anchor],
        step=step,
        match=match,
        proof=Proof(match.error, 3, "one step, as an affine map of its state, on random float64 data"),
    )
    if state_in.meta.get("example_value") is not None:
        step.state_example = state_in.meta["example_value"]  # with symbolic sizes, for what is inserted into the graph
    offset = len(loop.lasts) + len(loop.stacks)
    for user in anchor.users:
        number = user.args[1] if user.op == "call_function" and isinstance(user.args[1], int) else None
        if number is None:
            return Refusal("QLA301", "the loop's results are used in an unusual way", source_of(user) or loop.source)
        if (number < len(loop.lasts) and loop.lasts[number] == new_state) or (
            number >= offset and step.state == Ref("inv", loop.writes[number - offset])
        ):
            found.state_out.append(user)
    return found


# --- a region over whole sequences ------------------------------------------------------------------------------------


def _as_sequence(
    functional: Functional, anchor: fx.Node, closed: set[fx.Node], device: torch.device
) -> Found | Refusal | None:
    region = cut(functional, anchor, closed)
    if not region.below:
        return None
    source = loop.source if (loop := loop_of(anchor)) is not None else source_of(anchor)
    if region.bytes() > memory_limit(device):
        return Refusal("QLA209", f"evaluating it takes {region.bytes() >> 30} GiB", source, stage="recognise")
    best: Refusal | None = None
    for states in start_hypotheses(region):
        region.states = states
        result = _match_region(region, anchor, source, device)
        if isinstance(result, Found):
            return result
        best = best or result
    return best


def _match_region(region: Region, anchor: fx.Node, source: str, device: torch.device) -> Found | Refusal | None:
    """Ask every pattern about a region, given what it is supposed to start from."""
    try:
        values = evaluate(region, 0, True, device)
    except Exception as e:  # as above
        return Refusal("QLA208", f"the region can not be evaluated ({type(e).__name__}: {e})", source)
    best: Refusal | None = None
    seen = view(region, values)
    for pattern in patterns():
        match = pattern.match_sequence(seen)
        if isinstance(match, Refusal):
            best = best or Refusal(match.code, match.reason, source, match.nearest_family, "recognise")
            continue
        roles = {at.key for at in match.roles.values()}
        inner = core(region, roles | set(region.states), [match.output.key])
        if isinstance(inner, Refusal):
            return Refusal(inner.code, inner.reason, inner.source or source, match.family, "recognise")
        if anchor not in inner:
            continue
        states = [s for s in region.states if _reaches(s, set(inner))]
        if len(states) > 1:
            return Refusal("QLA206", "the region starts from several states", source, match.family, "recognise")
        value_shape = values[match.roles["v"].key].shape
        return Found(
            match.family,
            "chunk",
            value_shape[match.roles["v"].time],
            _outermost(region, inner) or source,
            anchor,
            dict(match.roles),
            match.gate,
            match.scale,
            states[0] if states else None,
            (-2, -1),
            match.output,
            core=inner,
            match=match,
            region=region,
        )
    return best


def _reaches(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user in inside for user in node.users)


def _outermost(region: Region, inner: list[fx.Node]) -> str:
    """The line of the loop over chunks, if there is one."""
    loops = [loop for n in inner if (loop := loop_of(n)) is not None and loop.carry_out]
    return loops[-1].source if loops else ""


def outputs_below(found: Found, values: dict[fx.Node, Any]) -> list[tuple[fx.Node, torch.Tensor]]:
    """Float values of a region below its anchor, where its final state may be."""
    assert found.region is not None
    return [(n, values[n]) for n in found.region.below if n in values and is_float(values[n])]


def is_loop_call(node: fx.Node) -> bool:
    return isinstance(node.target, (Loop, WritingLoop))
