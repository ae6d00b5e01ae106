"""The part of a region between roles and outputs, and whether an evaluation of it is a proof (evaluate.ANALYTIC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .evaluate import ANALYTIC, CONSTANTS, VIEWS, analytic, is_in, op_name
from .functional import body_of
from .ir import Instr, Ref, Refusal, refs_in
from .regions import Region
from .roll.compare import source_of

SIZED = frozenset(["pad", "repeat_interleave", "tile", "repeat", "triu", "tril"])


def core(region: Region, roles: set[fx.Node], outputs: list[fx.Node]) -> list[fx.Node] | Refusal:
    """The nodes between roles and outputs, if an evaluation of them is a proof (see evaluate.ANALYTIC)."""
    inside, leaves = set(region.inside), set(region.leaves)
    found: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in found or node in roles:
            continue
        if node in leaves:
            return Refusal("QLA206", f"the outputs also depend on {node.name}, which plays no role", source_of(node))
        if node in inside:
            found.add(node)
            todo += node.all_input_nodes
    for node in found:
        varies = bool(region.varying & set(node.all_input_nodes))
        if not is_in(node.target, ANALYTIC):
            return Refusal("QLA208", f"the region contains {op_name(node.target)}", source_of(node))
        if varies and not _clear(node, region.varying):
            return Refusal("QLA208", f"{op_name(node.target)} depends on the data", source_of(node))
        if op_name(node.target) in ("to", "type", "half", "bfloat16", "type_as", "float") and _narrows(node):
            return Refusal("QLA303", "a value of the region is rounded to a lower precision", source_of(node))
        sizes = any(n in region.symbolic for n in node.all_input_nodes)
        if sizes and not is_in(node.target, VIEWS | CONSTANTS | SIZED):
            return Refusal("QLA206", f"{op_name(node.target)} uses a number that is not fixed", source_of(node))
    return [n for n in region.inside if n in found]


def _clear(node: fx.Node, varying: set[fx.Node]) -> bool:
    """Whether an operation is analytic in those of its arguments that vary."""
    value = node.meta.get("example_value")
    if op_name(node.target) in CONSTANTS:
        return True
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return False
    body = body_of(node.target)
    if body is not None:
        return _body_is_clear(body, node.args[1], varying)
    if op_name(node.target) in ("where", "masked_fill", "masked_fill_"):
        return node.args[0 if op_name(node.target) == "where" else 1] not in varying
    return analytic(node.target, tuple(node.args))


def _body_is_clear(body: tuple[Instr, ...], invs: Any, varying: set[fx.Node]) -> bool:
    """Whether every instruction of a loop is analytic in what varies; masks and the like may be made of constants."""
    steady: set[Ref] = {Ref("inv", j) for j, inv in enumerate(invs) if inv not in varying}
    for i, instr in enumerate(body):
        refs = [r for r in refs_in((instr.args, dict(instr.kwargs))) if r.kind != "int"]
        if all(r in steady for r in refs):
            steady.add(Ref("node", i))
            continue
        if analytic(instr.target, instr.args):
            continue
        name = op_name(instr.target).removesuffix("_")
        mask = instr.args[0 if name == "where" else 1] if name in ("where", "masked_fill") else None
        if not isinstance(mask, Ref) or mask not in steady:
            return False
    return True


def _narrows(node: fx.Node) -> bool:
    after, source = node.meta.get("example_value"), node.all_input_nodes
    before = source[0].meta.get("example_value") if source else None
    if not (isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor)):
        return False
    return after.dtype.is_floating_point and after.dtype.itemsize < before.dtype.itemsize
