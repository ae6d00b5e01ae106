"""Bring an unrolled graph into the form in which its repetitions show."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from ..evaluate import op_name
from ..fxtools import alias_roots, written_nodes

MIN_STEPS = 2


def has_repetition(graph: fx.Graph) -> bool:
    """Whether it is worth looking for a loop: the same operation on different integers, several times."""
    counts = Counter(str(n.target) for n in graph.nodes if n.op in ("call_function", "call_method"))
    return any(count >= 2 * MIN_STEPS for count in counts.values())


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with its own nodes and the same example values."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, env.__getitem__)
    return copy


def sink_slices(graph: fx.Graph) -> None:
    """``x.unbind(d)[i]``, and ``x[i]`` taken for many i beforehand, become ``x.select(d, i)`` at each use: a read at
    the loop index."""
    roots = alias_roots(graph)
    written = {root for node in graph.nodes for target in written_nodes(node) for root in roots[target]}
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            items = [
                u for u in node.users if u.target is operator.getitem and u.args[0] is node and type(u.args[1]) is int
            ]
            if len(items) >= 2 * MIN_STEPS and not roots[node] & written:
                _sink(graph, items, node, 0)
        elif node.op in ("call_function", "call_method") and op_name(node.target) == "unbind":
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            items = [u for u in node.users if u.target is operator.getitem and type(u.args[1]) is int]
            if isinstance(dim, int) and not roots[node.args[0]] & written:
                _sink(graph, items, node.args[0], dim)
            if not node.users:
                graph.erase_node(node)


def _sink(graph: fx.Graph, items: list[fx.Node], source: fx.Node, dim: int) -> None:
    for item in items:
        for user in list(item.users):
            if user.op == "output":
                continue
            with graph.inserting_before(user):
                read = graph.call_function(torch.select, (source, dim, item.args[1]))
            read.meta = dict(item.meta)
            user.replace_input_with(item, read)
        if not item.users:
            graph.erase_node(item)
