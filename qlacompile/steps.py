"""A rolled loop seen as one step: what it reads at the index, what it writes there, and the rest as a function of a
state."""

from __future__ import annotations

from typing import Any

import torch

from .access import Indexed, Unfit
from .body import Entangled, functional
from .evaluate import CONSTANTS, PROLOGUE, VIEWS, Evaluator, analytic, draw, hint, is_in, op_name
from .fxtools import body_writes, changes_mode
from .ir import Instr, Loop, Ref, Refusal, Value, refs_in, resolve

_CASTS = frozenset(["to", "type", "half", "bfloat16", "float", "double", "type_as", "_to_copy"])


class LoopStep:
    """Implements :class:`qlacompile.ir.StepView` for a rolled loop whose arguments have the given shapes and dtypes."""

    def __init__(self, loop: Loop, carries: list[torch.Tensor], invs: list[Any], bases: list[int]) -> None:
        """``carries`` and ``invs`` are meta tensors (or other example values) of the loop's arguments."""
        try:
            self.loop, self.finals = functional(loop)
        except Entangled as e:
            raise Unfit(Refusal("QLA302", str(e), e.instr.source or loop.source, stage="recognise")) from e
        self.invs, self.bases = invs, bases
        self.reads: dict[int, Indexed] = {}
        self.written: dict[int, Indexed] = {}  # instruction that writes -> where
        self.output_refs: list[Ref] = []
        self.output_where: list[tuple[str, Any]] = []  # ("stack", number) or ("write", instruction)
        self.skipped: set[int] = set()
        self.nodes: list[Any] = []  # the graph's nodes for the invariants; set once a pattern has matched
        self.axes = (-2, -1)  # of the state: key and value; set once a pattern has matched
        self.evaluator = Evaluator()
        self._data: dict[int, dict[Ref, torch.Tensor]] = {}
        self._find_accesses()
        self._find_state(carries)
        self._find_outputs()
        self._classify()

    def refuse(self, code: str, reason: str, instr: Instr | None = None) -> Unfit:
        return Unfit(Refusal(code, reason, (instr.source if instr else "") or self.loop.source, stage="recognise"))

    # --- structure ----------------------------------------------------------------------------------------------------

    def _moving(self, value: Any) -> bool:
        return any(r.kind == "int" and self.loop.slopes[r.index] != 0 for r in refs_in(value))

    def _indexed(self, instr: Instr) -> Indexed | None:
        """The access that an indexing instruction makes, if it is one at the loop index."""
        args = instr.args
        if not args or not isinstance(args[0], Ref) or args[0].kind != "inv":
            return None
        tensor = self.invs[args[0].index]
        if not isinstance(tensor, torch.Tensor):
            return None
        name = op_name(instr.target)
        if name == "select" and len(args) == 3:
            dim = self._int(args[1]) % tensor.dim()
            index: tuple[Any, ...] = (*[slice(None)] * dim, args[2])
        elif name in ("getitem", "setitem"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
        else:
            return None
        if any(isinstance(r, Ref) and r.kind != "int" for r in refs_in(index)):
            return None
        moving = [i for i, entry in enumerate(index) if self._moving(entry)]
        if len(moving) != 1:
            return None
        entry = moving[0]
        ellipsis = next((i for i, a in enumerate(index) if a is Ellipsis), None)
        if ellipsis is not None:
            fill = tensor.dim() - sum(1 for a in index if a is not None and a is not Ellipsis)
            index = (*index[:ellipsis], *[slice(None)] * fill, *index[ellipsis + 1 :])
            entry += fill - 1 if entry > ellipsis else 0
        axis = sum(1 for a in index[:entry] if a is not None)
        position = sum(1 for a in index[:entry] if a is None or isinstance(a, slice))
        here = index[entry]
        kept = isinstance(here, slice)
        ref = here.start if kept else here
        if not isinstance(ref, Ref):
            return None
        base, slope = self.bases[ref.index], self.loop.slopes[ref.index]
        if not isinstance(base, int):
            return None
        if kept:
            if not isinstance(here.stop, Ref) or here.step not in (None, 1):
                return None
            stop, stop_slope = self.bases[here.stop.index], self.loop.slopes[here.stop.index]
            if stop_slope != slope or stop - base != 1:
                return None
        last = base + slope * (self.loop.steps - 1)
        size = tensor.shape[axis]
        if min(base, last) < 0 or (isinstance(size, int) and max(base, last) >= size):
            raise self.refuse("QLA205", f"the index runs from {base} to {last} over an axis of size {size}", instr)
        constant = tuple(resolve(a, lambda r: self.bases[r.index]) if i != entry else a for i, a in enumerate(index))
        return Indexed(args[0].index, constant, entry, axis, position, base, slope, kept)

    def _int(self, value: Any) -> int:
        return self.bases[value.index] if isinstance(value, Ref) else value

    def _find_accesses(self) -> None:
        writes, _ = body_writes(self.loop.body)
        views: dict[int, Indexed] = {}
        for i, instr in enumerate(self.loop.body):
            if changes_mode(instr.target):
                raise self.refuse("QLA304", "the loop switches a global mode", instr)
            if not self._moving((instr.args, dict(instr.kwargs))):
                if op_name(instr.target) == "copy_" and isinstance(instr.args[0], Ref):
                    target = views.get(instr.args[0].index) if instr.args[0].kind == "node" else None
                    if target is not None:
                        self.written[i] = target
                        self.skipped |= {i, instr.args[0].index}
                continue
            access = self._indexed(instr)
            if access is not None and access.inv in {w.inv for w in self.written.values()}:
                raise self.refuse("QLA302", "the loop accesses a tensor that it writes to more than once", instr)
            if access is None:
                raise self.refuse(
                    "QLA205", f"the loop index is used in {op_name(instr.target)} in an unusual way", instr
                )
            if op_name(instr.target) == "setitem":
                self.written[i] = access
                self.skipped.add(i)
            elif access.inv in writes:
                views[i] = access
            else:
                self.reads[i] = access
        used_views = {w for i in self.skipped for w in [i] if i in views}
        if set(views) - used_views:
            instr = self.loop.body[min(set(views) - used_views)]
            raise self.refuse("QLA302", "the loop reads back what it wrote", instr)
        self.buffers = {access.inv for access in self.written.values()}
        for i, instr in enumerate(self.loop.body):
            if i in self.skipped:
                continue
            for ref in refs_in((instr.args, dict(instr.kwargs))):
                if ref.kind == "inv" and ref.index in self.buffers:
                    raise self.refuse("QLA302", "the loop reads a tensor that it writes to", instr)
        self.in_place = sorted(self.finals)

    def _find_state(self, carries: list[torch.Tensor]) -> None:
        states: list[Ref] = [Ref("carry", j) for j in range(len(carries))]
        states += [Ref("inv", j) for j in self.in_place]
        if not states:
            raise self.refuse("QLA201", "the loop carries no state")
        if len(states) > 1:
            raise self.refuse("QLA201", f"the loop carries {len(states)} states")
        self.state = states[0]
        example = carries[0] if self.state.kind == "carry" else self.invs[self.state.index]
        if not isinstance(example, torch.Tensor) or example.dim() < 2 or not example.dtype.is_floating_point:
            raise self.refuse("QLA201", "the carried value is not a floating-point matrix")
        self.state_example = example
        self.state_shape = tuple(int(s) for s in example.shape)
        dependent: set[Ref] = {self.state}
        for i, instr in enumerate(self.loop.body):
            if i not in self.skipped and dependent & set(refs_in((instr.args, dict(instr.kwargs)))):
                dependent.add(Ref("node", i))
        self.dependent = dependent

    def _find_outputs(self) -> None:
        for i, access in self.written.items():
            instr = self.loop.body[i]
            value = instr.args[-1]
            if not isinstance(value, Ref) or access.kept:
                raise self.refuse("QLA204", "what the loop writes at the index is not a computed value", instr)
            self.output_where.append(("write", i))
            self.output_refs.append(value)
        for number, ref in enumerate(self.loop.stacks):
            self.output_where.append(("stack", number))
            self.output_refs.append(ref)
        self.outputs = len(self.output_refs)

    def _classify(self) -> None:
        """Which instructions a pattern may look through.

        What depends on the state must be analytic and stay in its precision. What does not is looked through where it
        is analytic in what the step reads; any other such value (clamped, rounded, masked, detached) is a *barrier*: a
        leaf of its own with random data, so that it can be a role itself but nothing behind it can.
        """
        self.barriers: set[int] = set()
        self.unknown: set[int] = set()  # booleans, integers, tuples that vary: no leaf can stand for them
        varying: set[Ref] = set(self.dependent)
        for i, instr in enumerate(self.loop.body):
            ref = Ref("node", i)
            inputs = [r for r in refs_in((instr.args, dict(instr.kwargs))) if r.kind != "int"]
            if i in self.skipped:
                continue
            if i in self.reads:
                varying.add(ref)
                if not self.invs[self.reads[i].inv].dtype.is_floating_point:
                    self.unknown.add(i)
                continue
            self._check_sizes(instr, inputs)
            if ref in self.dependent:
                self._check_dependent(i, instr, inputs, varying)
                continue
            changing = [r for r in inputs if r in varying or self._is_tensor(r)]
            if not changing:
                if not is_in(instr.target, PROLOGUE):
                    raise self.refuse("QLA208", f"the loop contains {op_name(instr.target)}", instr)
                continue
            varying.add(ref)
            clear = not any(r.kind == "node" and r.index in self.unknown for r in inputs)
            real = instr.dtype is None or instr.dtype.is_floating_point
            # exp of a bfloat16 gate is rounded to bfloat16; beside a float32 state that is part of what is computed
            rounded = instr.dtype is not None and instr.dtype.itemsize < self.state_example.dtype.itemsize
            clear = clear and not (rounded and not is_in(instr.target, VIEWS))
            if clear and real and analytic(instr.target, instr.args) and not self._narrows(instr, inputs):
                continue
            if not is_in(instr.target, PROLOGUE):
                raise self.refuse("QLA208", f"the loop contains {op_name(instr.target)}", instr)
            if instr.dtype is not None and instr.dtype.is_floating_point:
                self.barriers.add(i)
            else:
                self.unknown.add(i)

    def _is_tensor(self, ref: Ref) -> bool:
        return ref.kind == "inv" and isinstance(self.invs[ref.index], torch.Tensor)

    def _check_sizes(self, instr: Instr, inputs: list[Ref]) -> None:
        """A symbolic number may be a size, but not a factor: a match would hold for its present value only."""
        for ref in inputs:
            value = self.invs[ref.index] if ref.kind == "inv" else None
            if isinstance(value, (torch.SymFloat, torch.SymBool)) or (
                isinstance(value, torch.SymInt) and not is_in(instr.target, VIEWS | CONSTANTS)
            ):
                raise self.refuse("QLA206", f"{op_name(instr.target)} uses a number that is not fixed", instr)

    def _check_dependent(self, i: int, instr: Instr, inputs: list[Ref], varying: set[Ref]) -> None:
        name = op_name(instr.target)
        if not analytic(instr.target, instr.args):
            masks = name in ("where", "masked_fill") and len(instr.args) > 1
            mask = instr.args[0 if name == "where" else 1] if masks else None
            if not masks or any(r in varying or self._is_tensor(r) for r in refs_in(mask)):
                raise self.refuse("QLA202", f"the state goes through {name}", instr)
        if any(r.kind == "node" and r.index in self.unknown for r in inputs):
            raise self.refuse("QLA202", f"the state is combined with integers or booleans ({name})", instr)
        if instr.dtype is not None and not instr.dtype.is_floating_point:
            raise self.refuse("QLA202", f"the state is turned into {instr.dtype}", instr)
        if name in _CASTS and self._narrows(instr, inputs) and Ref("node", i) not in self.output_refs:
            raise self.refuse("QLA303", f"the state is rounded to {instr.dtype} in the loop", instr)

    def _narrows(self, instr: Instr, inputs: list[Ref]) -> bool:
        """Whether a cast loses digits of what it is given."""
        if instr.dtype is None or op_name(instr.target) not in _CASTS or not inputs:
            return False
        source = inputs[0]
        if source == self.state or source.kind == "carry":
            before: torch.dtype | None = self.state_example.dtype
        elif source.kind == "inv":
            before = getattr(self.invs[source.index], "dtype", None)
        else:
            before = self.loop.body[source.index].dtype
        return before is None or not before.is_floating_point or instr.dtype.itemsize < before.itemsize

    # --- StepView -----------------------------------------------------------------------------------------------------

    def leaves(self, trial: int) -> dict[Ref, torch.Tensor]:
        """Random data for what the step reads and for the invariants that it uses whole."""
        if trial not in self._data:
            generator = torch.Generator().manual_seed(7919 * trial + 17)
            data: dict[Ref, Any] = {}
            slices: dict[tuple[int, int, int, int], torch.Tensor] = {}
            for i, access in self.reads.items():
                # reads of the same place are the same data, however they are indexed
                place = (access.inv, access.axis, access.base, access.slope)
                if place not in slices:
                    shape = list(map(int, self.invs[access.inv].shape))
                    shape[access.axis] = 1
                    magnitude = 1.0 if shape[-1] < 2 or len(shape) < 3 else 1.7 / shape[-1] ** 0.5
                    slices[place] = draw(tuple(shape), generator, magnitude, self.evaluator.device)
                index = list(access.index)
                index[access.entry] = slice(0, 1) if access.kept else 0
                data[Ref("node", i)] = slices[place][tuple(index)]
                if i in self.unknown:
                    data[Ref("node", i)] = data[Ref("node", i)].to(self.invs[access.inv].dtype)
            used = {
                r.index
                for n, i in enumerate(self.loop.body)
                if n not in self.reads
                for r in refs_in((i.args, dict(i.kwargs)))
                if r.kind == "inv"
            }
            for j in sorted(used - self.buffers):
                value = self.invs[j]
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                    data[Ref("inv", j)] = draw(tuple(map(int, value.shape)), generator, 1.0, self.evaluator.device)
                elif isinstance(value, torch.Tensor):
                    raise self.refuse("QLA208", "the step uses a tensor of integers or booleans")
                else:
                    data[Ref("inv", j)] = hint(value) if isinstance(value, torch.SymInt) else value
            self._add_barriers(data, generator)
            self._data[trial] = data
        return self._data[trial]

    def _add_barriers(self, data: dict[Ref, torch.Tensor], generator: torch.Generator) -> None:
        """Random data for barriers; they are run once to learn their shapes."""
        env: dict[Ref, Any] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        free = [i for i in range(len(self.loop.body)) if Ref("node", i) not in self.dependent and i not in self.skipped]
        for i in free:
            ref = Ref("node", i)
            self._run(env, [i])
            if i in self.barriers:
                shape = tuple(env[ref].shape)
                data[ref] = draw(shape, generator, 1.7 / max(shape[-1:] or (1,)) ** 0.5, self.evaluator.device)
                env[ref] = data[ref]
            elif i in self.unknown:
                data[ref] = env[ref]

    def run(self, state: torch.Tensor, trial: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        env: dict[Ref, Any] = dict(self.leaves(trial))
        env[self.state] = state.clone()
        self._run(env, range(len(self.loop.body)))
        if self.state.kind == "inv":
            new = env[self.finals[self.state.index]]
        else:
            out = self.loop.carry_out[self.state.index]
            new = env[out]
        return new, [env[r] for r in self.output_refs]

    def _run(self, env: dict[Ref, Any], which: Any) -> None:
        for j, base in enumerate(self.bases):
            env.setdefault(Ref("int", j), base)
        for i in which:
            ref = Ref("node", i)
            if i in self.skipped or ref in env:
                continue
            instr = self.loop.body[i]
            args = resolve(instr.args, env.__getitem__)
            kwargs = {k: resolve(v, env.__getitem__) for k, v in instr.kwargs}
            env[ref] = self.evaluator.instr(instr, args, kwargs)

    def values(self, trial: int) -> list[Value]:
        env: dict[Ref, Any] = dict(self.leaves(trial))
        leaves = list(env)
        free = [i for i in range(len(self.loop.body)) if Ref("node", i) not in self.dependent and i not in self.skipped]
        env = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in env.items()}
        self._run(env, free)
        keys = leaves + [r for i in free if (r := Ref("node", i)) not in leaves]
        floats = ((k, env[k]) for k in keys if k != self.state)
        return [Value(k, v) for k, v in floats if isinstance(v, torch.Tensor) and v.dtype == torch.float64]

    def slice_for(self, ref: Ref) -> list[int]:
        """The instructions, in order, that compute a state-independent value from reads and invariants."""
        needed: set[int] = set()
        todo = [ref]
        while todo:
            r = todo.pop()
            if r.kind != "node" or r.index in needed:
                continue
            needed.add(r.index)
            if r.index not in self.reads:
                todo += refs_in((self.loop.body[r.index].args, dict(self.loop.body[r.index].kwargs)))
        return sorted(needed)
