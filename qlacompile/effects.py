"""What a rewrite removes must not be seen by anything else.

After the region's outputs are replaced, the nodes that computed them must have become dead: a value of the region that
is used elsewhere keeps the loop alive, and running both would be slower than running one. Memory that a role's node
stands for must still hold the same numbers where the operator reads it.
"""

from __future__ import annotations

from torch import fx

from .functional import Functional
from .fxtools import alias_roots, changes_mode, written_nodes
from .ir import Refusal
from .roll.compare import source_of


def last_position(nodes: list[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    return max(nodes, key=order.__getitem__)


def unsafe_reads(functional: Functional, role_nodes: list[fx.Node], at: fx.Node) -> Refusal | None:
    """A refusal if a role's memory is written between where the node is computed and ``at``, where it will be read."""
    order = {n: i for i, n in enumerate(functional.source.nodes)}
    for node in role_nodes:
        if node in functional.versions or node in functional.opaque:
            return Refusal("QLA302", f"{node.name} is written in place", source_of(node), stage="effects")
        origin = functional.origin[node]
        for writer in functional.source.nodes:
            if not order[origin] < order[writer] < order[at]:
                continue
            for target in written_nodes(writer):
                if functional.roots[target] & functional.roots[origin]:
                    return Refusal("QLA302", f"{node.name} is written in place", source_of(writer), stage="effects")
    return None


def mode_switch(functional: Functional, first: fx.Node, last: fx.Node) -> Refusal | None:
    """A refusal if gradient, autocast or other modes are switched between two nodes of the source graph."""
    inside = False
    for node in functional.source.nodes:
        inside = inside or node is first
        if inside and node.op == "call_function" and changes_mode(node.target):
            return Refusal("QLA304", f"{node.target} inside the region", source_of(node), stage="effects")
        if node is last:
            break
    return None


def epochs(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node how many mode switches stand before it: equal numbers mean the same gradient and autocast modes."""
    count, found = 0, {}
    for node in graph.nodes:
        if node.op == "call_function" and changes_mode(node.target):
            count += 1
        found[node] = count
    return found


def survivors(
    functional: Functional, replaced: set[tuple[fx.Node, fx.Node]], core: set[fx.Node], read: set[fx.Node]
) -> tuple[set[fx.Node], fx.Node | None]:
    """Which source nodes are dead once the given uses are replaced; and a node that keeps the region alive, if any.

    ``replaced`` are (user, used) pairs of source nodes that will read the operator's outputs instead; ``core`` are the
    source nodes of the region, ``read`` those that the operator will read. A write is alive if what it writes to is
    read later, or is visible outside the graph.
    """
    source = functional.source
    roots = alias_roots(source, replaced)
    alive: set[fx.Node] = set()
    todo: list[fx.Node] = list(read)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in source.nodes:
        for target in written_nodes(node):
            for root in roots[target]:
                writers.setdefault(root, []).append(node)
        if node.op in ("output", "placeholder") or (node.op == "call_function" and _keeps_itself(node)):
            todo.append(node)
    reason: dict[fx.Node, fx.Node] = {}
    while todo:
        node = todo.pop()
        if node in alive:
            continue
        alive.add(node)
        for used in node.all_input_nodes:
            if (node, used) not in replaced:
                reason.setdefault(used, node)
                todo.append(used)
        # a tensor that is read, or that somebody outside can see, keeps the writes to its memory
        for root in roots.get(node, ()):
            for writer in writers.get(root, []):
                reason.setdefault(writer, node)
                todo.append(writer)
    kept = next((n for n in source.nodes if n in core and n in alive), None)
    while kept is not None and reason.get(kept) in core:
        kept = reason[kept]
    dead = {n for n in source.nodes if n not in alive}
    return dead, (reason.get(kept) or kept) if kept is not None else None


def _keeps_itself(node: fx.Node) -> bool:
    if changes_mode(node.target):
        return True
    schema = getattr(node.target, "_schema", None)
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_assert", "manual_seed", "print")) or (schema is not None and "effect" in str(schema))
