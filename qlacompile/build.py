"""Insert nodes into a Dynamo graph, each with the example value that the rest of torch.compile expects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class Builder:
    """Adds call_function nodes in front of ``before`` and computes their example values in the graph's own fake
    mode."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph, self.before = graph, before
        self.stack_trace: str | None = None
        values = (n.meta.get("example_value") for n in graph.nodes)
        # Dynamo hands the backend another fake mode than the one of its example values; new values must use the latter
        self.fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        if self.stack_trace:
            node.meta["stack_trace"] = self.stack_trace
        real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.fake_mode or contextlib.nullcontext(), torch.no_grad():
            node.meta["example_value"] = target(*real_args, **real_kwargs)
        return node

    def value(self, node: fx.Node) -> Any:
        return node.meta["example_value"]

    def shape(self, node: fx.Node) -> list[Any]:
        return list(self.value(node).shape)

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size as an argument: the number, or for a symbolic size a node that computes it."""
        size = self.shape(node)[dim]
        return size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

    # --- shapes -------------------------------------------------------------------------------------------------------

    def permute(self, node: fx.Node, order: list[int]) -> fx.Node:
        return node if order == list(range(len(order))) else self.call(torch.permute, node, order)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.value(node).dtype == dtype:
            return node
        # torch.Tensor.to as a function would make AOTAutograd's cache give up
        return self.call(torch.ops.aten._to_copy.default, node, dtype=dtype)

    def fit(self, node: fx.Node, want: list[Any]) -> fx.Node:
        """The same numbers in the same order with the axes ``want``: axes of size one come and go."""
        have = self.shape(node)
        if _same(have, want):
            return node
        if [s for s in have if not _one(s)] != [s for s in want if not _one(s)]:
            if all(isinstance(s, int) for s in (*have, *want)):
                return self.call(torch.reshape, node, want)
            raise ValueError(f"axes {have} can not become {want}")
        for dim in reversed(range(len(have))):
            if _one(have[dim]):
                node = self.call(torch.squeeze, node, dim)
        for dim, size in enumerate(want):
            if _one(size):
                node = self.call(torch.unsqueeze, node, dim)
        return node


def _one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b))
