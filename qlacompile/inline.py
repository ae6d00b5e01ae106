"""Move into a loop's body what was computed for all steps in front of it, where each step's part is separate.

``kb = k * beta[..., None]`` before the loop and ``kb[:, t]`` in it is ``k[:, t] * beta[:, t, ..., None]``. A pattern
that sees k and beta instead of an unrelated kb can name their roles. Only elementwise operations and added axes of size
one are moved; the graph itself does not change.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .evaluate import op_name
from .fxtools import words
from .ir import Instr, Loop, Ref, resolve
from .steps import LoopStep

ELEMENTWISE = words(
    """
    mul multiply add sub subtract rsub div divide true_divide truediv neg negative exp exp2 log sigmoid rsqrt sqrt
    reciprocal pow square to float double type_as contiguous clone softplus logsigmoid clamp clamp_min clamp_max
    """
)


def inline(step: LoopStep, nodes: list[fx.Node], fixed: set[fx.Node]) -> tuple[Loop, list[fx.Node]] | None:
    """The loop with one layer of producers moved in, and its invariants (the old ones first); None if there are none.

    ``nodes`` are the loop's invariants; what is in ``fixed`` stays outside.
    """
    body: list[Instr] = []
    moved: dict[int, Ref] = {}  # old instruction -> where its result is now
    invs = list(nodes)
    changed = False

    def renamed(value: Any) -> Any:
        return resolve(value, lambda r: moved[r.index] if r.kind == "node" else r)

    def emit(instr: Instr) -> Ref:
        body.append(instr)
        return Ref("node", len(body) - 1)

    for i, instr in enumerate(step.loop.body):
        access = step.reads.get(i)
        producer = nodes[access.inv] if access is not None else None
        parts = _parts(producer, fixed) if producer is not None else None
        if access is None or producer is None or parts is None:
            args, kwargs = renamed(instr.args), tuple((k, renamed(v)) for k, v in instr.kwargs)
            moved[i] = emit(replace(instr, args=args, kwargs=kwargs))
            continue
        changed = True
        rank = producer.meta["example_value"].dim()
        entries = [a for a in access.index if a is not None]
        entries += [slice(None)] * (rank - len(entries))
        moved[i] = _rebuild(producer, parts, entries, access.index, invs, emit, instr.source)
    if not changed:
        return None
    loop = replace(
        step.loop,
        body=tuple(body),
        carry_out=tuple(renamed(step.loop.carry_out)),
        lasts=tuple(renamed(step.loop.lasts)),
        stacks=tuple(renamed(step.loop.stacks)),
    )
    return loop, invs


def _parts(producer: fx.Node, fixed: set[fx.Node]) -> str | None:
    """ "elementwise" or "axis" for a producer that can be moved in."""
    value = producer.meta.get("example_value")
    if producer in fixed or producer.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
        return None
    operands = producer.all_input_nodes
    examples = [n.meta.get("example_value") for n in operands]
    if not operands or any(not isinstance(e, torch.Tensor) or e.dim() > value.dim() for e in examples):
        return None
    if op_name(producer.target) in ELEMENTWISE:
        return "elementwise"
    return "axis" if new_axis(producer) is not None else None


def new_axis(node: fx.Node) -> int | None:
    """Where a node adds an axis of size one to its argument, if that is all it does."""
    rank = node.meta["example_value"].dim()
    if op_name(node.target) == "unsqueeze":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return dim % rank if isinstance(dim, int) else None
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        index = node.args[1]
        plain = all(a is None or a is Ellipsis or a == slice(None) for a in index)
        if plain and sum(a is None for a in index) == 1:
            where = index.index(None)
            after = sum(1 for a in index[where + 1 :] if a is not Ellipsis)
            return rank - 1 - after if Ellipsis in index[:where] else where
    return None


def _rebuild(
    producer: fx.Node,
    kind: str,
    entries: list[Any],
    index: tuple[Any, ...],
    invs: list[fx.Node],
    emit: Any,
    source: str,
) -> Ref:
    """Instructions for ``producer[index]`` from its operands at the same place."""

    def read(node: fx.Node, at: list[Any]) -> Ref:
        if node not in invs:
            invs.append(node)
        args = (Ref("inv", invs.index(node)), tuple(at))
        return emit(Instr("call_function", operator.getitem, args, (), source))

    if kind == "axis":
        axis = new_axis(producer)
        assert axis is not None
        at = entries[:axis] + entries[axis + 1 :]
        result = read(producer.args[0], at)
        place = sum(1 for a in entries[:axis] if isinstance(a, slice))
        if isinstance(entries[axis], slice):
            shape = (*[slice(None)] * place, None)
            result = emit(Instr("call_function", operator.getitem, (result, shape), (), source))
    else:
        full = producer.meta["example_value"].shape

        def operand(node: fx.Node) -> Ref:
            shape = node.meta["example_value"].shape
            skip = len(full) - len(shape)
            at = []
            for d, entry in enumerate(entries[skip:]):
                broadcast = shape[d] == 1 and full[skip + d] != 1
                at.append((slice(None) if isinstance(entry, slice) else 0) if broadcast else entry)
            return read(node, at)

        args, kwargs = fx.node.map_arg((tuple(producer.args), dict(producer.kwargs)), operand)
        result = emit(Instr(producer.op, producer.target, tuple(args), tuple(kwargs.items()), source))
    if any(a is None for a in index):
        kept = tuple(None if a is None else slice(None) for a in index if a is None or isinstance(a, slice))
        result = emit(Instr("call_function", operator.getitem, (result, kept), (), source))
    return result
