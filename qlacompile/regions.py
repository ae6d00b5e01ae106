"""Cut the part of a graph that belongs to one recurrence over whole sequences, and run it on random float64 data.

A region hangs on an anchor: a rolled loop or a triangular solve. Downwards it takes what follows by known operations;
upwards it takes what leads there, until projections, unknown operations and the graph's inputs, which become random
leaves. Roles are then looked for among all values on the way, so how much prologue a user wrote does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .evaluate import (
    PROLOGUE,
    VIEWS,
    Evaluator,
    draw,
    is_float,
    is_in,
    op_name,
    shape_of,
)
from .functional import Functional, body_of
from .ir import Loop, SequenceView, Value

SOLVES = frozenset(["solve_triangular", "solve", "inv", "inverse", "inv_ex", "solve_ex", "triangular_solve"])
PRODUCTS = frozenset(
    ["matmul", "bmm", "mm", "mv", "einsum", "baddbmm", "addmm", "addbmm", "inner", "tensordot", "dot", "linear"]
)
DOWNWARD_LIMIT = 400
CPU_BYTES_LIMIT = 12 << 30


def anchors(graph: fx.Graph) -> list[fx.Node]:
    """Where a recurrence may be, in graph order."""
    return [
        n
        for n in graph.nodes
        if n.op in ("call_function", "call_method") and (body_of(n.target) is not None or op_name(n.target) in SOLVES)
    ]


def loop_of(node: fx.Node) -> Loop | None:
    base = getattr(node.target, "base", node.target)
    return base if isinstance(base, Loop) else None


@dataclass
class Region:
    """The nodes around an anchor: ``leaves`` get random data, ``inside`` is evaluated (in graph order), ``below`` is
    the part of it that depends on the anchor. ``states`` are the nodes that may hold an initial state."""

    anchor: fx.Node
    leaves: list[fx.Node] = field(default_factory=list)
    inside: list[fx.Node] = field(default_factory=list)
    below: list[fx.Node] = field(default_factory=list)
    states: list[fx.Node] = field(default_factory=list)
    symbolic: dict[fx.Node, int] = field(default_factory=dict)
    varying: set[fx.Node] = field(default_factory=set)

    def bytes(self) -> int:
        """Roughly what an evaluation holds: one float64 copy of every value that is no view and that is kept."""
        total = 0
        for node in [*self.leaves, *self.inside]:
            shape = shape_of(node)
            if shape is not None and len(shape) <= 4 and not is_in(node.target, VIEWS):
                total += 8 * int(torch.Size(shape).numel())
        return total


def cut(functional: Functional, anchor: fx.Node, closed: set[fx.Node]) -> Region:
    """The region around ``anchor``; nodes in ``closed`` (outputs of regions found before) are leaves."""
    from .evaluate import hint

    region = Region(anchor)
    status: dict[fx.Node, str] = {}
    below: set[fx.Node] = set()
    started = False
    count = 0
    for node in functional.graph.nodes:
        value = node.meta.get("example_value")
        inputs = node.all_input_nodes
        if isinstance(value, torch.SymInt):
            status[node] = "size"
            region.symbolic[node] = hint(value)
        elif node in closed or node in functional.opaque:
            status[node] = "leaf" if is_float(value) and node not in functional.opaque else "bad"
        elif (
            node.op not in ("call_function", "call_method")
            or not is_in(node.target, PROLOGUE)
            or _projection(node)
            or any(status[i] == "bad" for i in inputs)
        ):
            status[node] = "leaf" if is_float(value) else "bad"
        else:
            status[node] = "inside"
        started = started or node is anchor
        if node is anchor:
            below.add(node)
            if status[node] != "inside":
                return region
        elif started and status[node] == "inside" and below & set(inputs) and count < DOWNWARD_LIMIT:
            below.add(node)
            count += 1
    needed: set[fx.Node] = set()
    todo = list(below)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        if status[node] == "inside":
            todo += node.all_input_nodes
    for node in functional.graph.nodes:
        if node not in needed:
            continue
        if status[node] == "leaf":
            region.leaves.append(node)
            region.varying.add(node)
        elif status[node] == "inside":
            region.inside.append(node)
            if region.varying & set(node.all_input_nodes):
                region.varying.add(node)
    region.below = [n for n in region.inside if n in below]
    return region


def _projection(node: fx.Node) -> bool:
    """A product with a parameter: what comes before it is not part of the recurrence."""
    if op_name(node.target) not in PRODUCTS:
        return False
    for operand in node.all_input_nodes:
        while (
            operand.op in ("call_function", "call_method") and is_in(operand.target, VIEWS) and operand.all_input_nodes
        ):
            operand = operand.all_input_nodes[0]
        if isinstance(operand.meta.get("example_value"), torch.nn.Parameter):
            return True
    return False


def start_hypotheses(region: Region) -> list[list[fx.Node]]:
    """What the recurrence may start from: the values that carrying loops begin with; without such a loop nothing, or
    one of the leaves that is as large as a state."""
    found: list[fx.Node] = []
    carrying = False
    for node in region.below:
        loop = loop_of(node)
        if loop is not None and loop.carry_out:
            carrying = True
            found += [c for c in node.args[0] if c in region.varying and c not in found]
    if carrying:
        return [found]
    leaves = [
        n
        for n in region.leaves
        if len(shape_of(n) or ()) >= 2 and not isinstance(n.meta.get("example_value"), torch.nn.Parameter)
    ]
    # an initial state is used late: the last leaves first
    return [[], *([leaf] for leaf in reversed(leaves[:8]) if _used_below(leaf, region))]


def _used_below(leaf: fx.Node, region: Region) -> bool:
    """Whether a leaf reaches the part below the anchor other than through the anchor."""
    below, inside = set(region.below) - {region.anchor}, set(region.inside)
    todo, seen = [leaf], set()
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in below:
                return True
            if user in inside and user not in seen and user is not region.anchor:
                seen.add(user)
                todo.append(user)
    return False


def evaluate(
    region: Region,
    trial: int,
    zero_states: bool,
    device: torch.device,
    keep: Callable[[fx.Node], bool] | None = None,
) -> dict[fx.Node, Any]:
    """The values of the region's nodes for random leaves: those that ``keep`` asks for, by default all that a
    pattern may choose from."""
    generator = torch.Generator().manual_seed(104729 * trial + 5)
    evaluator = Evaluator(device)
    values: dict[fx.Node, Any] = dict(region.symbolic)
    for leaf in region.leaves:
        shape = shape_of(leaf) or ()
        parameter = isinstance(leaf.meta.get("example_value"), torch.nn.Parameter)
        if parameter:
            magnitude = 0.5
        elif len(shape) >= 4:
            magnitude = 1.7 / max(shape[-1], 1) ** 0.5
        else:
            magnitude = (0.1, 0.1, 0.3)[trial % 3]
        values[leaf] = draw(shape, generator, magnitude, device)
    for state in region.states:
        shape = shape_of(state) or ()
        data = draw(shape, generator, 1.0, device)
        values[state] = torch.zeros_like(data) if zero_states else data
    return evaluator.run(region.inside, values, keep or (lambda n: len(shape_of(n) or range(9)) <= 4))


def memory_limit(device: torch.device) -> int:
    """How many bytes an evaluation may take."""
    if device.type == "cuda":
        return int(0.6 * torch.cuda.mem_get_info(device)[0])
    return CPU_BYTES_LIMIT


def view(region: Region, values: dict[fx.Node, Any]) -> SequenceView:
    """What a pattern may choose from."""
    below = set(region.below)

    def usable(node: fx.Node) -> bool:
        value = values.get(node)
        return is_float(value) and 1 <= value.dim() <= 4 and node in region.varying and node not in region.states

    inputs = [n for n in _in_order(region) if n not in below and usable(n)]
    outputs = [n for n in region.below if usable(n)]
    return SequenceView([Value(n, values[n]) for n in inputs], [Value(n, values[n]) for n in outputs])


def _in_order(region: Region) -> list[fx.Node]:
    return [*region.leaves, *region.inside]
