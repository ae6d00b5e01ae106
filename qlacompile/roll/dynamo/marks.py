"""What the trace looked like at the top of an iteration, and whether anything but the accounted-for has changed
since."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo import symbolic_convert as sc
from torch._dynamo.variables import ConstantVariable, ListVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker

from ...ir import Refusal
from ..compare import Index, Unequal
from .lists import RolledListVariable, WatchedList, own_items


class State:
    """All mutable state of the hook. ``active`` are the symbolic iterations being traced now, outermost first."""

    enabled = True
    installed = False
    off_reason = ""
    marks: dict[int, list[Mark]] = {}  # by iterator  # noqa: RUF012
    active: list[Mark] = []  # noqa: RUF012
    blacklist: set[Any] = set()  # loops of this process that do not roll  # noqa: RUF012
    refusals: dict[Any, list[Refusal]] = {}  # by compiled frame  # noqa: RUF012
    counter = 0


_IGNORED_FIELDS = {"source", "mutation_type", "user_code_variable_name", "parents_tracker", "_cache"}


def leaf(value: Any) -> Any:
    if isinstance(value, VariableTracker):
        value = value.unwrap()
        if isinstance(value, ConstantVariable):
            return ("const", type(value.value).__name__, repr(value.value))
        if isinstance(value, (TensorVariable, SymNodeVariable)):
            return ("node", id(value.as_proxy().node))
        return ("var", id(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(leaf, value))
    if isinstance(value, dict):
        return tuple((leaf(getattr(k, "vt", k)), leaf(v)) for k, v in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, sc.InstructionTranslatorBase):  # a suspended generator
        return (id(value), value.instruction_pointer, leaf(value.symbolic_locals), leaf(value.stack))
    return ("object", id(value))


def _fields(variable: VariableTracker) -> Any:
    return tuple((key, leaf(value)) for key, value in variable.__dict__.items() if key not in _IGNORED_FIELDS)


class Mark:
    """A snapshot at FOR_ITER: where the graph ends, this frame's locals, and a fingerprint of everything else."""

    def __init__(self, tx: Any, it: Any) -> None:
        out = tx.output
        self.tx, self.it, self.graph = tx, it, out.graph
        self.node = out.graph._root._prev
        self.start, self.len = it.start, it.len
        self.locals = {name: value.unwrap() for name, value in tx.symbolic_locals.items()}
        self.fingerprint: dict[int, tuple[VariableTracker, Any]] = {}
        self.lists: dict[int, tuple[Any, int]] = {}
        self.index: Index | None = None
        self.guards = len(out.shape_env.guards)
        self.watched: list[WatchedList] = []
        self.unguard: Any = lambda: None

        def note(variable: VariableTracker) -> None:
            variable = variable.unwrap()
            if isinstance(variable, (ConstantVariable, TensorVariable, SymNodeVariable)):
                return
            if type(variable) in (ListVariable, WatchedList, RolledListVariable):
                items = own_items(variable)
                self.lists[id(variable)] = (variable, len(items))
                self.fingerprint[id(variable)] = (variable, ("list", leaf(items)))
            else:
                self.fingerprint[id(variable)] = (variable, _fields(variable))

        roots: list[Any] = []
        frame, frames = tx, []
        while frame is not None:
            roots += [dict(frame.symbolic_locals), list(frame.stack)]
            if frame is not tx:
                frames.append((id(frame), leaf(frame.symbolic_locals), leaf(frame.stack)))
            frame = frame.parent
        effects = out.side_effects
        attributes = {id(k): (k, v) for k, v in effects.store_attr_mutations.items()}
        roots += [list(effects.id_to_variable.values()), [list(v.values()) for _, v in attributes.values()]]
        roots.append(dict(getattr(tx, "symbolic_globals", {})))
        VariableTracker.visit(note, roots)
        self.rest = (
            tuple(frames),
            leaf(tx.stack),
            leaf(dict(getattr(tx, "symbolic_globals", {}))),
            len(out.random_calls),
            len(effects.tensor_hooks),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        self.attributes = {key: leaf(v) for key, (_, v) in attributes.items()}
        self._alive = (roots, attributes)  # keeps ids from being reused

    def segment(self, end: Mark) -> list[fx.Node]:
        nodes, node = [], self.node.next
        stop = end.node.next
        while node is not stop:
            nodes.append(node)
            node = node.next
        return nodes


def check_unchanged(a: Mark, b: Mark) -> None:
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
