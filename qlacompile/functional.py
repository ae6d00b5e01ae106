"""A copy of a graph without writes, to reason on. The graph itself is left as it is.

Each write to a tensor that is only known under its own name becomes an operation that returns the changed tensor, and
later uses see that. Writes through views and to tensors with other live views are not followed: what they touch is
``opaque`` and no region may contain it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .fxtools import alias_roots, written_nodes
from .ir import Instr, Loop


@dataclass(frozen=True, eq=False)
class Write:
    """The functional form of an operation that writes to its first argument."""

    op: str
    base: Any

    @property
    def __name__(self) -> str:
        return f"functional_{self.base if isinstance(self.base, str) else getattr(self.base, '__name__', 'write')}"

    def __call__(self, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = target.clone()
        if self.op == "call_method":
            getattr(fresh, self.base)(*args, **kwargs)
        else:
            self.base(fresh, *args, **kwargs)
        return fresh


@dataclass(frozen=True, eq=False)
class WritingLoop:
    """The functional form of a rolled loop that writes: its outputs, then each invariant that it wrote to."""

    base: Loop

    @property
    def __name__(self) -> str:
        return f"functional_{self.base.name}"

    def __call__(self, carries: Any, invs: Any, bases: Any) -> tuple[Any, ...]:
        return self.run(carries, invs, bases, None)

    def run(self, carries: Any, invs: Any, bases: Any, call: Any) -> tuple[Any, ...]:
        own = [value.clone() if j in self.base.writes else value for j, value in enumerate(invs)]
        return (*self.base.run(carries, own, bases, call), *(own[j] for j in self.base.writes))


@dataclass
class Functional:
    """``graph`` computes what ``source`` does; ``origin`` maps its nodes to those of ``source``.

    A node for a later version of a written tensor has the writing node as its origin and is in ``versions``, mapped to
    the source node whose memory it stands for.
    """

    source: fx.Graph
    graph: fx.Graph
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    versions: dict[fx.Node, fx.Node] = field(default_factory=dict)
    opaque: set[fx.Node] = field(default_factory=set)
    roots: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)


def functionalise(source: fx.Graph) -> Functional:
    result = Functional(source, fx.Graph(), roots=alias_roots(source))
    graph, roots = result.graph, result.roots
    env: dict[fx.Node, fx.Node] = {}
    order = {node: i for i, node in enumerate(source.nodes)}
    aliases: dict[fx.Node, list[fx.Node]] = {}
    for node, found in roots.items():
        for root in found:
            aliases.setdefault(root, []).append(node)
    same: dict[fx.Node, list[fx.Node]] = {}  # nodes that are the very same tensor as a root
    tainted: set[fx.Node] = set()

    def followable(write: fx.Node, target: fx.Node) -> bool:
        if len(roots[target]) != 1:
            return False
        (root,) = roots[target]
        known = [root, *same.get(root, [])]
        if target not in known or root in tainted:
            return False
        others = [a for a in aliases[root] if a not in known and a is not write and order[a] < order[write]]
        return not any(order[user] > order[write] for a in others for user in a.users)

    for node in source.nodes:
        targets = written_nodes(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if not targets:
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta = node.meta
            env[node], result.origin[copy] = copy, node
            if roots[node] & tainted:
                result.opaque.add(copy)
            continue
        if not all(followable(node, target) for target in targets):
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta = node.meta
            env[node], result.origin[copy] = copy, node
            for target in targets:
                tainted |= roots[target]
            result.opaque.add(copy)
            for root in tainted:
                result.opaque.update(env[a] for a in aliases[root] if a in env)
            continue
        if isinstance(node.target, Loop):
            call = graph.call_function(WritingLoop(node.target), args, kwargs)
            call.meta = node.meta
            env[node], result.origin[call] = call, node
            outputs = len(node.target.lasts) + len(node.target.stacks)
            for j, index in enumerate(node.target.writes):
                (root,) = roots[node.args[1][index]]
                version = graph.call_function(operator.getitem, (call, outputs + j))
                version.meta = {"example_value": root.meta.get("example_value")}
                result.origin[version], result.versions[version] = node, root
                for alias in (root, *same.get(root, [])):
                    env[alias] = version
            continue
        (root,) = roots[targets[0]]
        call = graph.call_function(Write(node.op, node.target), args, kwargs)
        call.meta = {"example_value": root.meta.get("example_value"), "stack_trace": node.meta.get("stack_trace")}
        result.origin[call], result.versions[call] = node, root
        if node.target is not operator.setitem and roots[node] == {root}:
            same.setdefault(root, []).append(node)
        for alias in (root, *same.get(root, []), node):
            env[alias] = call
    return result


def body_of(target: Any) -> tuple[Instr, ...] | None:
    """The instructions of a rolled loop, functional or not; None for anything else."""
    base = target.base if isinstance(target, WritingLoop) else target
    return base.body if isinstance(base, Loop) else None
