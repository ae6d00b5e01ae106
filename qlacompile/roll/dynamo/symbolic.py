"""Trace one iteration with a symbolic index that stands for all that are left."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch._dynamo.source import ConstantSource
from torch._dynamo.variables import ListVariable, SymNodeVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._sympy.value_ranges import ValueRanges

from ..compare import Index, Unequal
from .lists import RolledListIterator, RolledListVariable, WatchedList, own_items
from .marks import Mark, State

original_run_node = dynamo_utils.run_node


def loop_index(value: int) -> int:
    """Placeholder node of a symbolic index; erased before the graph is finished."""
    raise RuntimeError("a symbolic loop index was left in the graph; please report this")


def begin_symbolic(tx: Any, it: Any, mark: Mark) -> None:
    """Push a symbolic index instead of the next value of the iterator."""
    env = tx.output.shape_env
    value, last = it.start, it.start + it.step * (it.len - 1)
    State.counter += 1
    source = ConstantSource(f"__qlacompile_index{State.counter}")
    symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
    env.var_to_range[symbol] = ValueRanges(min(value, last), max(value, last))
    symint = env.create_symintnode(symbol, hint=value, source=source)
    mark.index = Index(symbol, value, it.step)
    mark.guards = len(env.guards)
    for variable, _ in list(mark.lists.values()):
        if type(variable) in (ListVariable, RolledListVariable) and _grew(mark, variable):
            WatchedList.watch(variable)
            mark.watched.append(variable)  # type: ignore[arg-type]
    State.active.append(mark)
    proxy = tx.output.create_proxy("call_function", loop_index, (value,), {})
    proxy.node.meta["example_value"] = symint
    it.len -= 1
    it.start += it.step
    index = SymNodeVariable(proxy, symint)
    if isinstance(it, RolledListIterator):
        only = it.source_list.only_stack()
        if only is None:
            raise Unequal("the list is not one stacked tensor")
        stacked = only.as_proxy()
        item = tx.output.create_proxy("call_function", operator.getitem, (stacked, proxy), {})
        tx.push(wrap_fx_proxy(tx, item))
    else:
        tx.push(index)


def _grew(mark: Mark, variable: ListVariable) -> bool:
    marks = State.marks[id(mark.it)]
    before = marks[-2].lists.get(id(variable))
    return before is not None and len(own_items(variable)) > before[1]


def end_symbolic(mark: Mark) -> None:
    if mark in State.active:
        del State.active[State.active.index(mark) :]
    for watched in mark.watched:
        if type(watched) is WatchedList:
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


def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
    target = node.target
    if target in (operator.getitem, operator.setitem) and isinstance(args[0], torch.Tensor) and _has_symint(args[1]):
        if target is operator.getitem:
            return _symbolic_getitem(args[0], args[1])
        value = args[2]
        place = _symbolic_getitem(args[0], args[1])
        place.copy_(value) if isinstance(value, torch.Tensor) else place.fill_(value)
        return None
    return original_run_node(tracer, node, args, kwargs, nnmodule)
