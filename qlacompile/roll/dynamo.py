"""Roll a Python loop into one node while Dynamo traces it. The only file that touches Dynamo's internals.

At the top of every iteration of ``for i in range(...)`` Dynamo executes FOR_ITER. The hook lets two iterations be traced
as usual, then feeds the third one a *symbolic* index whose range is all that is left. If tracing it adds no guard and no
replacement on that symbol, then Python took the same path and all shapes were the same for every remaining index; if its
operations also line up with the iteration before, one body describes them all. Anything else restarts the analysis with
this loop left alone, so that a loop that is not rolled is traced exactly as without us.

What a loop may change, and how it is accounted for: locals and tuples of tensors (last values), lists that only grow
(stacked), integers that are affine in the index, tensors written in place (the body writes to them). Every other change
that is reachable from any frame or from Dynamo's side effects is found by comparing fingerprints, and refuses the roll.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import operator
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch._dynamo.utils as dynamo_utils
from torch import fx
from torch._dynamo import symbolic_convert as sc
from torch._dynamo.exc import ObservedException, RestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import ListIteratorVariable, RangeIteratorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._sympy.value_ranges import ValueRanges

from ..errors import CODES
from ..fxtools import body_writes, changes_mode
from ..ir import Loop, Ref, Refusal
from .compare import Body, Index, Unequal, bind, compare, kept, same_shape

log = logging.getLogger("qlacompile.roll")

CONCRETE = 2  # iterations traced as usual before the symbolic one
MIN_LEFT = 2  # iterations that must be left for the symbolic one, itself included


class _State:
    """All mutable state of the hook. ``active`` are the symbolic iterations being traced now, outermost first."""

    enabled = True
    installed = False
    off_reason = ""
    marks: dict[int, list[_Mark]] = {}  # by iterator  # noqa: RUF012
    active: list[_Mark] = []  # noqa: RUF012
    blacklist: set[Any] = set()  # loops of this process that do not roll  # noqa: RUF012
    refusals: dict[Any, list[Refusal]] = {}  # by compiled frame  # noqa: RUF012
    counter = 0


# --- what the trace looked like at the top of an iteration -----------------------------------------------------------

_IGNORED_FIELDS = {"source", "mutation_type", "user_code_variable_name", "parents_tracker", "_cache"}


def _leaf(value: Any) -> Any:
    if isinstance(value, VariableTracker):
        value = value.unwrap()
        if isinstance(value, ConstantVariable):
            return ("const", type(value.value).__name__, repr(value.value))
        if isinstance(value, (TensorVariable, SymNodeVariable)):
            return ("node", id(value.as_proxy().node))
        return ("var", id(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_leaf, value))
    if isinstance(value, dict):
        return tuple((_leaf(getattr(k, "vt", k)), _leaf(v)) for k, v in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, sc.InstructionTranslatorBase):  # a suspended generator
        return (id(value), value.instruction_pointer, _leaf(value.symbolic_locals), _leaf(value.stack))
    return ("object", id(value))


def _fields(variable: VariableTracker) -> Any:
    return tuple((key, _leaf(value)) for key, value in variable.__dict__.items() if key not in _IGNORED_FIELDS)


class _Mark:
    """A snapshot at FOR_ITER: where the graph ends, this frame's locals, and a fingerprint of everything else."""

    def __init__(self, tx: Any, it: Any) -> None:
        out = tx.output
        self.tx, self.it, self.graph = tx, it, out.graph
        self.node = out.graph._root._prev
        self.start, self.len = it.start, it.len
        self.locals = {name: value.unwrap() for name, value in tx.symbolic_locals.items()}
        self.fingerprint: dict[int, tuple[VariableTracker, Any]] = {}
        self.lists: dict[int, tuple[ListVariable, int]] = {}
        self.index: Index | None = None
        self.guards = len(out.shape_env.guards)
        self.watched: list[_WatchedList] = []
        self.unguard: Any = lambda: None

        def note(variable: VariableTracker) -> None:
            variable = variable.unwrap()
            if isinstance(variable, (ConstantVariable, TensorVariable, SymNodeVariable)):
                return
            if type(variable) in (ListVariable, _WatchedList, RolledListVariable):
                items = _own_items(variable)
                self.lists[id(variable)] = (variable, len(items))
                self.fingerprint[id(variable)] = (variable, ("list", _leaf(items)))
            else:
                self.fingerprint[id(variable)] = (variable, _fields(variable))

        roots: list[Any] = []
        frame, frames = tx, []
        while frame is not None:
            roots += [dict(frame.symbolic_locals), list(frame.stack)]
            if frame is not tx:
                frames.append((id(frame), _leaf(frame.symbolic_locals), _leaf(frame.stack)))
            frame = frame.parent
        effects = out.side_effects
        attributes = {id(k): (k, v) for k, v in effects.store_attr_mutations.items()}
        roots += [list(effects.id_to_variable.values()), [list(v.values()) for _, v in attributes.values()]]
        roots.append(dict(getattr(tx, "symbolic_globals", {})))
        VariableTracker.visit(note, roots)
        self.rest = (
            tuple(frames),
            _leaf(tx.stack),
            _leaf(dict(getattr(tx, "symbolic_globals", {}))),
            len(out.random_calls),
            len(effects.tensor_hooks),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        self.attributes = {key: _leaf(v) for key, (_, v) in attributes.items()}
        self._alive = (roots, attributes)  # keeps ids from being reused

    def segment(self, end: _Mark) -> list[fx.Node]:
        nodes, node = [], self.node.next
        stop = end.node.next
        while node is not stop:
            nodes.append(node)
            node = node.next
        return nodes


def _check_unchanged(a: _Mark, b: _Mark) -> None:
    """Nothing but this frame's locals, the iterator and growing lists may differ between two marks."""
    attributes = any(value != a.attributes.get(key, value) for key, value in b.attributes.items())
    if a.rest != b.rest or attributes:
        raise Unequal("an attribute, cell, global, outer frame, hook or mode changes in the loop", "QLA105")
    for key, (variable, fields) in b.fingerprint.items():
        if key not in a.fingerprint or variable is a.it:
            continue
        before = a.fingerprint[key][1]
        if before == fields:
            continue
        if key in a.lists and fields[1][: a.lists[key][1]] == before[1]:
            continue  # a list that only grew
        raise Unequal(f"a {type(variable).__name__.removesuffix('Variable').lower()} changes in the loop", "QLA105")


def _own_items(variable: ListVariable) -> list[VariableTracker]:
    """The items that a list holds one by one: all of them, or for a rolled list those appended after its blocks."""
    fields = variable.__dict__
    return fields["items"] if "items" in fields else fields["_store"]


# --- lists ------------------------------------------------------------------------------------------------------------


class _WatchedList(ListVariable):
    """A growing list during the symbolic iteration: appending is fine, looking inside is noted."""

    @property
    def items(self) -> list[VariableTracker]:  # type: ignore[override]
        self.__dict__["_read"] = True
        return self.__dict__["_store"]

    @items.setter
    def items(self, value: list[VariableTracker]) -> None:
        self.__dict__["_read"] = True
        self.__dict__["_store"] = value

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if name == "append" and len(args) == 1 and not kwargs:
            return _append(self, tx, args[0])
        return super().call_method(tx, name, args, kwargs)

    @classmethod
    def watch(cls, variable: ListVariable) -> None:
        fields = variable.__dict__
        fields["_store"] = fields.pop("items") if "items" in fields else fields["_store"]
        fields["_read"] = False
        variable.__class__ = cls

    def release(self) -> None:
        fields = self.__dict__
        fields.pop("_read")
        if "blocks" in fields:
            self.__class__ = RolledListVariable  # type: ignore[assignment]
        else:
            items = fields.pop("_store")
            self.__class__ = ListVariable  # type: ignore[assignment]
            self.items = items


def _append(variable: ListVariable, tx: Any, item: VariableTracker) -> VariableTracker:
    tx.output.side_effects.mutation(variable)
    variable.__dict__["_store"].append(item)
    return ConstantVariable.create(None)


class RolledListVariable(ListVariable):
    """A list that rolled loops filled. ``blocks`` come first: lists of items, and pairs of (stacked tensors, steps) that
    stand for one slice of each tensor a step; ``_store`` holds what was appended since.

    ``torch.stack``/``torch.cat`` of it, indexing, appending and iterating cost a constant number of nodes; any other use
    turns it into an ordinary list with one node an item.
    """

    @classmethod
    def grow(cls, variable: ListVariable, count: int, stacks: list[VariableTracker], steps: int) -> None:
        """A loop of ``steps`` iterations appended ``stacks`` to the first ``count`` own items of the list."""
        fields = variable.__dict__
        own = _own_items(variable)[:count]
        fields.pop("items", None)
        fields["blocks"] = [*fields.get("blocks", []), *([own] if own else []), (stacks, steps)]
        fields["_store"] = []
        variable.__class__ = cls

    def as_python_constant(self) -> Any:
        raise NotImplementedError

    def is_python_constant(self) -> bool:
        return False

    @property
    def items(self) -> list[VariableTracker]:  # type: ignore[override]
        tx = sc.InstructionTranslator.current_tx()
        items = [self.item(tx, i) for i in range(self.length)]
        for key in ("blocks", "_store"):
            self.__dict__.pop(key)
        self.__class__ = ListVariable  # type: ignore[assignment]
        self.items = items
        return items

    def _parts(self) -> list[Any]:
        store = self.__dict__["_store"]
        return [*self.__dict__["blocks"], *([store] if store else [])]

    @property
    def length(self) -> int:
        return sum(len(p) if isinstance(p, list) else len(p[0]) * p[1] for p in self._parts())

    def only_stack(self) -> VariableTracker | None:
        """The one tensor that the whole list is the slices of, if there is one."""
        parts = self._parts()
        single = len(parts) == 1 and not isinstance(parts[0], list) and len(parts[0][0]) == 1
        return parts[0][0][0] if single else None

    def item(self, tx: Any, i: int) -> VariableTracker:
        for part in self._parts():
            size = len(part) if isinstance(part, list) else len(part[0]) * part[1]
            if i >= size:
                i -= size
                continue
            if isinstance(part, list):
                return part[i]
            step, which = divmod(i, len(part[0]))
            stacked = part[0][which].as_proxy()
            example = _fresh(tx, stacked.node.meta["example_value"][0])
            proxy = tx.output.create_proxy("call_function", operator.getitem, (stacked, step), {})
            return wrap_fx_proxy(tx, proxy, example_value=example)
        raise IndexError(i)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if name == "append" and len(args) == 1 and not kwargs:
            return _append(self, tx, args[0])
        return super().call_method(tx, name, args, kwargs)

    def getitem_const(self, tx: Any, arg: VariableTracker) -> VariableTracker:
        index = arg.as_python_constant() if isinstance(arg, ConstantVariable) else None
        if isinstance(index, int) and -self.length <= index < self.length:
            return self.item(tx, index % self.length)
        return super().getitem_const(tx, arg)

    def join(self, tx: Any, cat: bool, dim: int) -> VariableTracker:
        """``torch.cat(self, dim)`` or ``torch.stack(self, dim)`` in a few ordinary nodes."""

        def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
            return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", target, args, kwargs)).as_proxy()

        pieces: list[Any] = []
        for part in self._parts():
            if isinstance(part, list):
                items = [v.as_proxy() for v in part]
                pieces += items if cat else [emit(torch.stack, items, dim)]
                continue
            stacks = [s.as_proxy() for s in part[0]]
            piece = stacks[0] if len(stacks) == 1 else emit(torch.flatten, emit(torch.stack, stacks, 1), 0, 1)
            axis = dim % (piece.node.meta["example_value"].dim() - (1 if cat else 0))
            piece = emit(torch.movedim, piece, 0, axis)
            pieces.append(emit(torch.flatten, piece, axis, axis + 1) if cat else piece)
        if len(pieces) > 1:
            proxy = tx.output.create_proxy("call_function", torch.cat, (pieces, dim), {})
        else:
            proxy = tx.output.create_proxy(
                "call_function", torch.clone, (pieces[0],), {"memory_format": torch.contiguous_format}
            )
        return wrap_fx_proxy(tx, proxy)


_JOINS = {torch.stack: False, torch.cat: True, torch.concat: True, torch.concatenate: True}


def _call_torch(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``torch.stack``/``torch.cat`` of a rolled list; every other call as before."""
    cat = _JOINS.get(self.value) if args and callable(self.value) else None
    if cat is not None and type(args[0].unwrap()) is RolledListVariable and len(args) <= 2 and set(kwargs) <= {"dim"}:
        dim = args[1] if len(args) == 2 else kwargs.get("dim", ConstantVariable.create(0))
        if isinstance(dim.unwrap(), ConstantVariable) and type(dim.unwrap().value) is int:
            return args[0].unwrap().join(tx, cat, dim.unwrap().value)
    return _original_call_torch(self, tx, args, kwargs)


class _RolledListIterator(ListIteratorVariable):
    """Iterates over a rolled list by index, so that FOR_ITER can roll over it as it does over a range."""

    def __init__(self, source_list: RolledListVariable, **kwargs: Any) -> None:
        super().__init__([], mutation_type=ValueMutationNew(), **kwargs)
        self.source_list = source_list
        self.start, self.step, self.len = 0, 1, source_list.length

    def tp_iternext_impl(self, tx: Any) -> VariableTracker:
        if self.len <= 0 or not isinstance(self.source_list, RolledListVariable):
            return super().tp_iternext_impl(tx) if self.len <= 0 else self._plain(tx)
        self.len -= 1
        self.start += 1
        return self.source_list.item(tx, self.start - 1)

    def _plain(self, tx: Any) -> VariableTracker:
        self.len -= 1
        self.start += 1
        return self.source_list.items[self.start - 1]

    next_variable = tp_iternext_impl

    def unpack_var_sequence(self, tx: Any) -> list[VariableTracker]:
        rest = self.source_list.items[self.start :]
        self.start, self.len = self.start + self.len, 0
        return list(rest)

    def force_unpack_var_sequence(self, tx: Any) -> list[VariableTracker]:
        return self.unpack_var_sequence(tx)


# --- the symbolic iteration -------------------------------------------------------------------------------------------


def loop_index(value: int) -> int:
    """Placeholder node of a symbolic index; erased before the graph is finished."""
    raise RuntimeError("a symbolic loop index was left in the graph; please report this")


def _begin_symbolic(tx: Any, it: Any, mark: _Mark) -> None:
    """Push a symbolic index instead of the next value of the iterator."""
    env = tx.output.shape_env
    value, last = it.start, it.start + it.step * (it.len - 1)
    _State.counter += 1
    source = ConstantSource(f"__qlacompile_index{_State.counter}")
    symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
    env.var_to_range[symbol] = ValueRanges(min(value, last), max(value, last))
    symint = env.create_symintnode(symbol, hint=value, source=source)
    mark.index = Index(symbol, value, it.step)
    mark.guards = len(env.guards)
    for variable, _ in list(mark.lists.values()):
        if type(variable) in (ListVariable, RolledListVariable) and _grew(mark, variable):
            _WatchedList.watch(variable)
            mark.watched.append(variable)  # type: ignore[arg-type]
    _State.active.append(mark)
    proxy = tx.output.create_proxy("call_function", loop_index, (value,), {})
    proxy.node.meta["example_value"] = symint
    it.len -= 1
    it.start += it.step
    index = SymNodeVariable(proxy, symint)
    if isinstance(it, _RolledListIterator):
        only = it.source_list.only_stack()
        if only is None:
            raise Unequal("the list is not one stacked tensor")
        stacked = only.as_proxy()
        item = tx.output.create_proxy("call_function", operator.getitem, (stacked, proxy), {})
        tx.push(wrap_fx_proxy(tx, item))
    else:
        tx.push(index)


def _grew(mark: _Mark, variable: ListVariable) -> bool:
    marks = _State.marks[id(mark.it)]
    before = marks[-2].lists.get(id(variable))
    return before is not None and len(_own_items(variable)) > before[1]


def _end_symbolic(mark: _Mark) -> None:
    if mark in _State.active:
        del _State.active[_State.active.index(mark) :]
    for watched in mark.watched:
        if type(watched) is _WatchedList:
            watched.release()
    mark.unguard()


def _has_symint(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_symint, value))
    return isinstance(value, slice) and _has_symint((value.start, value.stop, value.step))


def _symbolic_getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """``x[index]`` with symbolic integers; C++ indexing would turn them into constants."""
    index = index if isinstance(index, tuple) else (index,)
    dim = 0
    for position, a in enumerate(index):
        if a is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif a is Ellipsis:
            dim = x.dim() - sum(1 for later in index[position + 1 :] if later is not None)
        elif isinstance(a, slice):
            if a != slice(None):
                x = torch.ops.aten.slice.Tensor(x, dim, a.start, a.stop, a.step or 1)
            dim += 1
        elif isinstance(a, (int, torch.SymInt)) and not isinstance(a, bool):
            x = torch.ops.aten.select.int(x, dim, a)
        else:
            raise NotImplementedError(f"indexing with a symbolic integer and {type(a).__name__}")
    return x


def _run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
    target = node.target
    if target in (operator.getitem, operator.setitem) and isinstance(args[0], torch.Tensor) and _has_symint(args[1]):
        if target is operator.getitem:
            return _symbolic_getitem(args[0], args[1])
        value = args[2]
        place = _symbolic_getitem(args[0], args[1])
        place.copy_(value) if isinstance(value, torch.Tensor) else place.fill_(value)
        return None
    return _original_run_node(tracer, node, args, kwargs, nnmodule)


# --- emitting the rolled loop -----------------------------------------------------------------------------------------


def _fresh(tx: Any, example: torch.Tensor, lead: int | None = None) -> torch.Tensor:
    """A fake tensor like ``example``, contiguous when it gets a new leading dimension."""
    with tx.fake_mode, torch._C.DisableTorchFunctionSubclass():
        if lead is None:
            out = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
        else:
            out = torch.empty((lead, *example.shape), dtype=example.dtype, device=example.device)
        if example.requires_grad:
            out.requires_grad_(True)
    return out


def _live_at(instructions: list[Any], indexof: dict[Any, int], inst: Any) -> set[str]:
    """The local variables that may be read after the top of the loop before they are written again."""
    count = len(instructions)
    live: list[set[str]] = [set() for _ in range(count + 1)]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(count)):
            op, name = instructions[i].opname, instructions[i].argval
            out: set[str] = set()
            if not op.startswith(("RETURN", "RERAISE", "RAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                out |= live[i + 1]
            if instructions[i].target is not None:
                out |= live[indexof[instructions[i].target]]
            entry = getattr(instructions[i], "exn_tab_entry", None)
            if entry is not None:
                out |= live[indexof[entry.target]]
            if isinstance(name, tuple):  # fused instructions: count all as read
                out |= {n for n in name if isinstance(n, str)}
            elif op.startswith(("STORE_FAST", "STORE_DEREF")):
                out = out - {name}
            elif isinstance(name, str) and op.startswith(("LOAD_", "DELETE_")):
                out |= {name}
            if out != live[i]:
                live[i], changed = out, True
    return live[indexof[inst]]


class _Emitter:
    """Replaces the traced iterations by one node, and gives every surviving variable its value after the loop."""

    def __init__(self, tx: Any, body: Body, first: list[fx.Node], second: list[fx.Node], index: Index) -> None:
        self.tx, self.body, self.index = tx, body, index
        self.first = {n: i for i, n in enumerate(first)}
        self.second = {n: i for i, n in enumerate(second)}
        self.lasts: list[Ref] = []
        self.examples: list[Any] = []
        self.stacks: list[Ref] = []

    def position(self, a: VariableTracker, b: VariableTracker) -> Ref | None:
        """The body's result that is ``a`` in the first and ``b`` in the second iteration; None if it never changes."""
        na, nb = a.as_proxy().node, b.as_proxy().node
        if na is nb and nb not in self.second:
            return None
        if nb not in self.second or self.first.get(na) != self.second[nb]:
            raise Unequal("a variable does not hold the same result in both iterations")
        if type(a) is not type(b):
            raise Unequal("a variable changes its type")
        return Ref("node", self.second[nb])

    def plan(self, a: VariableTracker, b: VariableTracker, left: int) -> Any:
        """How to build a variable's value after the loop from the two compared iterations."""
        a, b = a.unwrap(), b.unwrap()
        if a is b and not isinstance(a, (TupleVariable,)):
            return ("keep", b)
        symbol = self.index.symbol
        if isinstance(b, SymNodeVariable) and symbol in b.sym_num.node.expr.free_symbols:
            expr = b.sym_num.node.expr
            before = sympy.Integer(a.value) if isinstance(a, ConstantVariable) and type(a.value) is int else None
            if before is None or expr.free_symbols != {symbol} or not sympy.diff(expr, symbol).is_Integer:
                raise Unequal("an integer variable is not affine in the loop index", "QLA103")
            if expr.subs(symbol, self.index.value - self.index.step) != before:
                raise Unequal("an integer variable does not follow the loop index", "QLA103")
            return ("const", int(expr.subs(symbol, self.index.value + self.index.step * (left - 1))))
        if isinstance(a, ConstantVariable) and isinstance(b, ConstantVariable):
            if type(a.value) is not type(b.value) or repr(a.value) != repr(b.value):
                raise Unequal("a Python value changes in the loop independently of the index", "QLA105")
            return ("keep", b)
        if isinstance(a, TensorVariable) and isinstance(b, TensorVariable):
            ref = self.position(a, b)
            if ref is None:
                return ("keep", b)
            if ref not in self.lasts:
                example = b.as_proxy().node.meta["example_value"]
                if any(self.index.symbol in _free(d) for d in example.shape):
                    raise Unequal("a variable's shape depends on the loop index", "QLA103")
                self.lasts.append(ref)
                self.examples.append(example)
            return ("last", self.lasts.index(ref))
        if type(a) is TupleVariable and type(b) is TupleVariable and len(a.items) == len(b.items):
            return ("tuple", [self.plan(x, y, left) for x, y in zip(a.items, b.items)])
        if type(a) is type(b) and _leaf(a) == _leaf(b):
            return ("keep", b)
        raise Unequal(f"a variable of type {type(b).__name__.removesuffix('Variable')} changes in the loop", "QLA105")

    def realise(self, plan: Any, outputs: list[VariableTracker]) -> VariableTracker:
        kind, value = plan
        if kind == "keep":
            return value
        if kind == "const":
            return ConstantVariable.create(value)
        if kind == "last":
            return outputs[value]
        return TupleVariable([self.realise(p, outputs) for p in value], mutation_type=ValueMutationNew())

    def base(self, value: Any) -> Any:
        """An integer for the graph: a constant, or nodes that compute an affine function of an outer index."""
        if isinstance(value, int):
            return value
        (symbol,) = value.free_symbols
        slope = sympy.diff(value, symbol)
        node = next(
            (n for n in self.tx.output.graph.nodes if n.target is loop_index and _expr_is(n, symbol)),
            None,
        )
        if node is None or not slope.is_Integer:
            raise Unequal("an integer depends on several loop indices", "QLA103")
        proxy = fx.Proxy(node, self.tx.output.current_tracer)
        symint = node.meta["example_value"]
        for target, operand in ((operator.mul, int(slope)), (operator.add, int(value.subs(symbol, 0)))):
            proxy = self.tx.output.create_proxy("call_function", target, (proxy, operand), {})
            symint = target(symint, operand)
            proxy.node.meta["example_value"] = symint
        return proxy


def _free(dim: Any) -> set[sympy.Symbol]:
    return dim.node.expr.free_symbols if isinstance(dim, torch.SymInt) else set()


def _expr_is(node: fx.Node, symbol: sympy.Symbol) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


def _roll(tx: Any, inst: Any, it: Any, marks: list[_Mark], where: str) -> None:
    """Emit the loop for the iterations between ``marks`` and all that are left. Changes nothing if it raises Unequal."""
    m0, m1, m2, m3 = marks
    index = m2.index
    assert index is not None
    env = tx.output.shape_env
    new_guards = [str(g.expr) for g in env.guards[m2.guards :] if index.symbol in g.expr.free_symbols]
    if new_guards or index.symbol in env.replacements:
        shown = new_guards[0] if new_guards else f"{index.symbol} == {env.replacements[index.symbol]}"
        raise Unequal(f"the path taken depends on the loop index ({shown})", "QLA103")
    for watched in m2.watched:
        if watched.__dict__.get("_read", True):
            raise Unequal("a list that grows in the loop is read in it", "QLA106")
    for watched in m2.watched:
        watched.release()
    _check_unchanged(m1, m2)
    _check_unchanged(m2, m3)
    outer = {m.index.symbol for m in _State.active if m.index is not None and m is not m2}
    indices = outer | {index.symbol}
    seg1, seg2 = m1.segment(m2), m2.segment(m3)
    body = compare(seg1, seg2, index, outer)
    first, second = kept(seg1, indices), kept(seg2, indices)
    if any(changes_mode(i.target) for i in body.instrs):
        raise Unequal("the loop switches gradient or autocast modes", "QLA105")
    for position, init in zip(body.carry_out, body.carry_in):
        a, b = first[position.index].meta.get("example_value"), init.meta.get("example_value")
        if not same_shape(a, b):
            raise Unequal("a carried value changes its shape or type", "QLA104")

    emitter = _Emitter(tx, body, first, second, index)
    left = it.len + 1  # the symbolic iteration stands for itself and all that are left
    live = _live_at(tx.instructions, tx.indexof, inst)
    plans = {}
    for name, b in m3.locals.items():
        a = m2.locals.get(name)
        if a is b and not isinstance(b, TupleVariable):
            continue
        if a is None or name not in live:
            plans[name] = None
            if name in live:
                raise Unequal(f"variable {name} appears in the loop", "QLA105")
            continue
        plans[name] = emitter.plan(a, b, left)
    grown: list[tuple[ListVariable, int, list[Ref]]] = []
    for key, (variable, n3) in m3.lists.items():
        if key not in m2.lists or key not in m1.lists:
            continue
        n2, n1 = m2.lists[key][1], m1.lists[key][1]
        if n3 == n2 == n1:
            continue
        if n3 - n2 != n2 - n1:
            raise Unequal("a list grows unevenly", "QLA105")
        refs = []
        own = _own_items(variable)
        for a, b in zip(own[n1:n2], own[n2:n3]):
            if not (isinstance(a.unwrap(), TensorVariable) and isinstance(b.unwrap(), TensorVariable)):
                raise Unequal("a list of something other than tensors grows", "QLA105")
            ref = emitter.position(a.unwrap(), b.unwrap())
            if ref is None:
                raise Unequal("a list grows by the same tensor in each iteration", "QLA105")
            example = b.as_proxy().node.meta["example_value"]
            if any(indices & _free(d) for d in example.shape):
                raise Unequal("the items of a list have different shapes", "QLA103")
            refs.append(ref)
        grown.append((variable, n1, refs))
        emitter.stacks.extend(r for r in refs)

    # the first iteration joins the loop if it is the same computation; else it stays in front of it
    seg0 = m0.segment(m1)
    start, init, bases, absorbed = m1, body.carry_in, list(body.bases), [*seg1, *seg2]
    try:
        carries = bind(body, seg0, -1, indices)
        for key, (_, n1) in m1.lists.items():
            if key in m0.lists and any(v is m1.lists[key][0] for v, _, _ in grown):
                refs = next(r for v, _, r in grown if v is m1.lists[key][0])
                if n1 - m0.lists[key][1] != len(refs):
                    raise Unequal("the first iteration appends differently")
        examples = [(a.meta.get("example_value"), b.meta.get("example_value")) for a, b in zip(carries, body.carry_in)]
        if not all(same_shape(a, b) for a, b in examples):
            raise Unequal("the first iteration changes a carried value's shape")
        outside = {u for n in seg0 for u in n.users} - set(seg0) - set(seg1) - set(seg2)
        if outside:
            raise Unequal("the first iteration is used elsewhere")
        start, init, absorbed = m0, carries, [*seg0, *absorbed]
        bases = [b - s for b, s in zip(body.bases, body.slopes)]
    except Unequal as e:
        log.debug("first iteration kept in front of the loop: %s", e)
    if any(set(n.users) - set(absorbed) for n in absorbed):
        raise Unequal("a value of the loop is used outside of it", "QLA105")

    steps = left + (m2.start - start.start) // index.step
    writes, _ = body_writes(body.instrs)
    loop = Loop(
        body=tuple(body.instrs),
        steps=steps,
        carry_out=tuple(body.carry_out),
        lasts=tuple(emitter.lasts),
        stacks=tuple(emitter.stacks),
        slopes=tuple(body.slopes),
        writes=tuple(sorted(writes)),
        source=where,
        name=f"rolled_loop_{_State.counter}",
    )
    tracer = tx.output.current_tracer
    proxies = (
        tuple(fx.Proxy(n, tracer) for n in init),
        tuple(fx.Proxy(n, tracer) for n in body.invs),
        tuple(emitter.base(b) for b in bases),
    )
    examples = [_fresh(tx, e) for e in emitter.examples]
    stacked = [_fresh(tx, second[r.index].meta["example_value"], steps) for r in emitter.stacks]
    node = tx.output.create_proxy("call_function", loop, proxies, {})
    node.node.meta["example_value"] = (*examples, *stacked)
    outputs = [
        wrap_fx_proxy(
            tx, tx.output.create_proxy("call_function", operator.getitem, (node, i), {}), example_value=example
        )
        for i, example in enumerate((*examples, *stacked))
    ]
    for name, plan in plans.items():
        if plan is None:
            tx.symbolic_locals.pop(name, None)
        else:
            tx.symbolic_locals[name] = emitter.realise(plan, outputs)
    offset = len(examples)
    for variable, n1, refs in grown:
        count = n1 if start is m1 else start.lists[id(variable)][1]
        RolledListVariable.grow(variable, count, outputs[offset : offset + len(refs)], steps)
        offset += len(refs)
    it.start += it.step * it.len
    it.len = 0
    for dead in reversed(absorbed):
        tx.output.graph.erase_node(dead)


# --- the hook ---------------------------------------------------------------------------------------------------------


def _ours(tx: Any) -> bool:
    """Whether the graph being traced goes to our backend, with rolling not switched off in its options."""
    fn = tx.output.compiler_fn
    for _ in range(8):
        if fn is None:
            return False
        options = (getattr(fn, "kwargs", None) or {}).get("options") or {}
        if options.get("flashqla.roll") is False:
            return False
        if getattr(fn, "_qlacompile_roll", False):
            return True
        fn = next(
            (
                inner
                for name in ("compiler_fn", "_torchdynamo_orig_backend", "__wrapped__")
                if (inner := getattr(fn, name, None)) is not None
            ),
            None,
        )
    return False


def _frame() -> Any:
    compile_id = CompileContext.current_compile_id()
    return (compile_id.frame_id, compile_id.frame_compile_id) if compile_id else None


def _line(tx: Any, inst: Any) -> str:
    positions = getattr(inst, "positions", None)
    line = (positions.lineno if positions else None) or inst.starts_line or tx.lineno
    return f"{tx.f_code.co_filename}:{line}"


def _before_for_iter(tx: Any, inst: Any) -> bool:
    """Called at the top of every iteration. True if the symbolic index was pushed and FOR_ITER is done."""
    it = tx.stack[-1].realize()
    if type(it) not in (RangeIteratorVariable, _RolledListIterator) or not _State.enabled or not _ours(tx):
        return False
    key = (_frame(), tx.f_code, inst.offset)
    marks = _State.marks.get(id(it))
    if marks is None or marks[0].it is not it:
        marks = []
    total = it.len + len(marks)
    if key in _State.blacklist or len(marks) > CONCRETE + 1 or total < CONCRETE + MIN_LEFT:
        return False
    _State.marks[id(it)] = marks
    marks.append(_Mark(tx, it))
    try:
        if len(marks) == CONCRETE + 1:
            _begin_symbolic(tx, it, marks[-1])
            _guard_steps(tx, inst, key, marks[-1])
            return True
        if len(marks) == CONCRETE + 2:
            _roll(tx, inst, it, marks, _line(tx, inst))
            _end_symbolic(marks[CONCRETE])
            _State.marks.pop(id(it))
    except Unequal as e:
        _refuse(tx, inst, key, e)
    return False


def _refuse(tx: Any, inst: Any, key: Any, why: Unequal) -> None:
    """Start the analysis of this frame over, with this loop left alone."""
    where = _line(tx, inst)
    _State.blacklist.add(key)
    _State.refusals.setdefault(key[0], []).append(Refusal(why.code, str(why), where, stage="roll"))
    log.debug("loop at %s not rolled: %s", where, why)
    for mark in list(_State.active):
        _end_symbolic(mark)
    _State.active.clear()
    _State.marks.clear()
    tx.speculation_log.clear()
    raise RestartAnalysis(restart_reason=f"{_RESTART} {where}: {why}")


_RESTART = "qlacompile could not roll the loop at"


def _guard_steps(tx: Any, inst: Any, key: Any, mark: _Mark) -> None:
    """While the symbolic iteration is traced, an error in it or a jump out of the loop is ours to repair."""
    first, last = tx.indexof[inst], tx.indexof[inst.target]
    step = tx.step

    def guarded_step() -> Any:
        try:
            more = step()
        except ObservedException:
            raise  # a Python exception on its way to a handler in the user's code
        except RestartAnalysis as e:
            if (e.restart_reason or "").startswith(_RESTART):
                raise
            _refuse(tx, inst, key, Unequal(f"tracing with a symbolic index failed ({e.restart_reason})", "QLA103"))
        except Exception as e:
            _refuse(tx, inst, key, Unequal(f"tracing with a symbolic index failed ({type(e).__name__}: {e})", "QLA103"))
        pointer = tx.instruction_pointer
        if mark in _State.active and (not more or pointer is None or not first <= pointer < last):
            _refuse(tx, inst, key, Unequal("the loop is left before its range ends", "QLA103"))
        return more

    tx.step = guarded_step
    mark.unguard = lambda: tx.__dict__.pop("step", None)


def _before_get_iter(tx: Any, inst: Any) -> bool:
    top = tx.stack[-1]
    if type(top) is not RolledListVariable or sys.version_info >= (3, 15):
        return False
    tx.pop()
    tx.push(_RolledListIterator(top))
    return True


def _before_list_append(tx: Any, inst: Any) -> bool:
    target = tx.stack[-1 - inst.arg].realize()
    if type(target) not in (_WatchedList, RolledListVariable):
        return False
    _append(target, tx, tx.pop())
    return True


_HOOKS = {"FOR_ITER": _before_for_iter, "GET_ITER": _before_get_iter, "LIST_APPEND": _before_list_append}


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


def _hooked(original: Any, before: Any) -> Any:
    @functools.wraps(original)
    def opcode(tx: Any, inst: Any) -> Any:
        return None if before(tx, inst) else original(tx, inst)

    return opcode


def install() -> str:
    """Install the hooks once and try them on two small loops. Returns "" or the reason why rolling is off."""
    if _State.installed:
        return _State.off_reason
    _State.installed = True
    try:
        if sys.version_info >= (3, 14):
            raise RuntimeError(f"Python {sys.version_info.major}.{sys.version_info.minor} was not checked")
        for cls in _subclasses(sc.InstructionTranslatorBase):
            table = cls.__dict__.get("dispatch_table")
            for name, before in _HOOKS.items():
                if table is not None and table[dis.opmap[name]] is not None:
                    table[dis.opmap[name]] = _hooked(table[dis.opmap[name]], before)
        dynamo_utils.run_node = _run_node
        TorchInGraphFunctionVariable.call_function = _call_torch
        _self_test()
    except Exception as e:
        _State.enabled = False
        _State.off_reason = f"{type(e).__name__}: {e}"
        warnings.warn(
            f"QLA101: {CODES['QLA101']} (torch {torch.__version__}, {_State.off_reason}); loops are unrolled, which "
            "compiles slowly for long sequences. Please report this.",
            stacklevel=2,
        )
    return _State.off_reason


def off_reason() -> str:
    """Why rolling is off, or ""."""
    return _State.off_reason


def take_refusals() -> list[Refusal]:
    """The loops of the frame that is being compiled that were not rolled, and why."""
    return _State.refusals.pop(_frame(), [])


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Leave all loops alone inside this block (for tests and comparisons)."""
    before, _State.enabled = _State.enabled, False
    try:
        yield
    finally:
        _State.enabled = before


def _self_test() -> None:
    """A loop that must roll, to one node, with the right value; and one that must not."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    backend._qlacompile_roll = True  # type: ignore[attr-defined]

    def uniform(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, outs, buffer = x[0] * 0, [], torch.zeros_like(x)
        for i in range(12):
            state = state * 0.5 + x[i]
            outs.append(state + 1)
            buffer[i] = state
        return torch.stack(outs, 1), buffer

    def irregular(x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for i in range(12):
            state = state * (2.0 if i == 7 else 0.5) + x[i]
        return state

    counters = {key: dict(value) for key, value in dynamo_utils.counters.items()}
    try:
        for fn, rolls in ((uniform, True), (irregular, False)):
            graphs.clear()
            x = torch.arange(36.0).reshape(12, 3) / 36
            expected, got = fn(x), torch.compile(fn, backend=backend, fullgraph=True)(x)
            pairs = zip(expected, got) if isinstance(expected, tuple) else [(expected, got)]
            if not all(torch.equal(a, b) for a, b in pairs):
                raise RuntimeError("self-test: a loop gives another value")
            if any(isinstance(n.target, Loop) for n in graphs[0].graph.nodes) is not rolls:
                raise RuntimeError(f"self-test: a loop was {'not ' if rolls else ''}rolled")
    finally:
        _State.refusals.clear()
        dynamo_utils.counters.clear()
        for key, value in counters.items():
            dynamo_utils.counters[key].update(value)


_original_run_node = dynamo_utils.run_node
_original_call_torch = TorchInGraphFunctionVariable.call_function
