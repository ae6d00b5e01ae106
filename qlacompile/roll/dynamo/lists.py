"""Python lists that grow in a loop: watched while an iteration is symbolic, and afterwards kept as stacked tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._dynamo import symbolic_convert as sc
from torch._dynamo.variables import ConstantVariable, ListVariable
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import ListIteratorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

original_call_torch = TorchInGraphFunctionVariable.call_function


def own_items(variable: ListVariable) -> list[VariableTracker]:
    """The items that a list holds one by one: all of them, or for a rolled list those appended after its blocks."""
    fields = variable.__dict__
    return fields["items"] if "items" in fields else fields["_store"]


def fresh(tx: Any, example: torch.Tensor, lead: int | None = None) -> torch.Tensor:
    """A fake tensor like ``example``, contiguous when it gets a new leading dimension."""
    with tx.fake_mode, torch._C.DisableTorchFunctionSubclass():
        if lead is None:
            out = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
        else:
            out = torch.empty((lead, *example.shape), dtype=example.dtype, device=example.device)
        if example.requires_grad:
            with torch.enable_grad():  # not a leaf: code after the loop may write to it
                out = out.requires_grad_(True).clone()
    return out


class WatchedList(ListVariable):
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
            return append(self, tx, args[0])
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


def append(variable: ListVariable, tx: Any, item: VariableTracker) -> VariableTracker:
    tx.output.side_effects.mutation(variable)
    variable.__dict__["_store"].append(item)
    return ConstantVariable.create(None)


class RolledListVariable(ListVariable):
    """A list that rolled loops filled. ``blocks`` come first: lists of items, and pairs of (stacked tensors, steps)
    that stand for one slice of each tensor a step; ``_store`` holds what was appended since.

    ``torch.stack``/``torch.cat`` of it, indexing, appending and iterating cost a constant number of nodes; any other
    use turns it into an ordinary list with one node an item.
    """

    @classmethod
    def grow(cls, variable: ListVariable, count: int, stacks: list[VariableTracker], steps: int) -> None:
        """A loop of ``steps`` iterations appended ``stacks`` to the first ``count`` own items of the list."""
        fields = variable.__dict__
        own = own_items(variable)[:count]
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
            example = fresh(tx, stacked.node.meta["example_value"][0])
            proxy = tx.output.create_proxy("call_function", operator.getitem, (stacked, step), {})
            return wrap_fx_proxy(tx, proxy, example_value=example)
        raise IndexError(i)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        if name == "append" and len(args) == 1 and not kwargs:
            return append(self, tx, args[0])
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


def call_torch(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``torch.stack``/``torch.cat`` of a rolled list; every other call as before."""
    cat = _JOINS.get(self.value) if args and callable(self.value) else None
    if cat is not None and type(args[0].unwrap()) is RolledListVariable and len(args) <= 2 and set(kwargs) <= {"dim"}:
        dim = args[1] if len(args) == 2 else kwargs.get("dim", ConstantVariable.create(0))
        if isinstance(dim.unwrap(), ConstantVariable) and type(dim.unwrap().value) is int:
            return args[0].unwrap().join(tx, cat, dim.unwrap().value)
    return original_call_torch(self, tx, args, kwargs)


class RolledListIterator(ListIteratorVariable):
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
