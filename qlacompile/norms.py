"""Recognise an l2norm in front of an operator's argument by what it computes, and measure its eps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .evaluate import Evaluator, op_name
from .fxtools import words

_NORM_OPS = words(
    """
    mul pow square sum add rsqrt sqrt reciprocal div true_divide truediv
    """
)


@dataclass(frozen=True)
class Peeled:
    """A role's node and the positions of its batch, time and head axes (None: absent); the feature axis is last."""

    node: fx.Node
    batch: int | None
    time: int
    head: int | None


def number_factor(node: fx.Node, name: str) -> float | None:
    """``c`` for ``x * c``, ``1 / c`` for ``x / c``."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], bool):
        return None
    number = node.args[1]
    if not isinstance(number, (int, float)) or number == 0:
        return None
    if name in ("mul", "multiply"):
        return float(number)
    return 1.0 / float(number) if name in ("div", "true_divide", "truediv", "divide") else None


def l2norm(at: Peeled, same_mode: Callable[[fx.Node], bool]) -> tuple[Peeled, float] | None:
    """(x, eps) if the node computes ``x * rsqrt(sum(x^2) + eps)`` over the last axis in float32 or wider."""
    node = at.node
    value = node.meta["example_value"]
    if value.dtype.itemsize < 4:
        return None
    inside: list[fx.Node] = []
    frontier: list[fx.Node] = [node]
    entries: set[fx.Node] = set()
    while frontier:
        n = frontier.pop()
        if n in inside or n in entries:
            continue
        simple = n.op in ("call_function", "call_method") and op_name(n.target) in _NORM_OPS
        if simple and same_mode(n) and len(inside) < 12 and not _scalar_multiple(n):
            inside.append(n)
            frontier += n.all_input_nodes
        else:
            entries.add(n)
    if len(entries) != 1:
        return None
    (x,) = entries
    example = x.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dim() != value.dim() or example.dtype != value.dtype:
        return None
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    inside.sort(key=order.__getitem__)
    eps = _measure_eps(x, node, inside, value.dim())
    return (replace(at, node=x), eps) if eps is not None else None


def _scalar_multiple(node: fx.Node) -> bool:
    return number_factor(node, op_name(node.target)) is not None


def _measure_eps(x: fx.Node, y: fx.Node, inside: list[fx.Node], rank: int) -> float | None:
    """The eps for which the nodes between x and y are an l2norm, found and checked on random vectors of several
    sizes."""
    generator = torch.Generator().manual_seed(3)
    found: list[float] = []
    for size in (1e-6, 1e-4, 1e-3, 1.0, 30.0):
        data = torch.randn((2,) * (rank - 1) + (8,), generator=generator, dtype=torch.float64) * size
        values: dict[fx.Node, Any] = {x: data}
        try:
            out = Evaluator().run(inside, values)[y]
        except Exception:  # an operation that needs other shapes is no l2norm
            return None
        squares = (data * data).sum(-1, keepdim=True)
        inverse = (out * data).sum(-1, keepdim=True) / squares
        if not torch.allclose(out, data * inverse, rtol=1e-9, atol=0):
            return None
        found += (inverse.pow(-2) - squares).flatten().tolist() if size < 1e-2 else []
        if size >= 1.0 and found:
            expected = data * torch.rsqrt(squares + found[0])
            if not torch.allclose(out, expected, rtol=1e-6, atol=0):
                return None
    eps = found[0]
    if eps <= 0 or any(abs(e - eps) > 1e-6 * eps + 1e-12 for e in found):
        return None
    return eps
