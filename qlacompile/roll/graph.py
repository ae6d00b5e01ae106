"""Find loops again in a graph that was traced unrolled, and roll them into the same :class:`~qlacompile.ir.Loop`
records.

For loops that Dynamo could not roll (``while``, ``zip`` over slices, a state kept in an object) and for graphs of other
origin. Works in time linear in the number of nodes: a token for each node (its operation and the shape of its
arguments, integers left out), runs of equal tokens at a fixed distance, then the exact comparison of :mod:`.compare`.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..build import Builder
from ..fxtools import body_writes, changes_mode
from ..ir import Loop, Ref
from .compare import Body, Unequal, bind, compare, source_of
from .prepare import MIN_STEPS, sink_slices

MAX_PERIOD = 4000


@dataclass
class Run:
    """``steps`` iterations of ``period`` nodes each, from position ``start`` of the node list."""

    start: int
    period: int
    steps: int


def reroll(gm: fx.GraphModule) -> int:
    """Roll every repetition of ``gm.graph`` in place; returns how many loops were made."""
    graph = gm.graph
    sink_slices(graph)
    count, after = 0, 0
    while True:
        nodes = [n for n in graph.nodes if n.op in ("call_function", "call_method", "get_attr", "call_module")]
        found = next((r for r in runs(nodes, after) if _roll(graph, nodes, r)), None)
        if found is None:
            return count
        count += 1
        after = found.start + 1


def tokens(nodes: list[fx.Node]) -> list[Any]:
    """What must be equal in all iterations at the same place, cheaply: the operation and the kinds of its arguments."""

    def kind(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "n"
        if isinstance(value, bool) or not isinstance(value, (int, tuple, list, slice)):
            return repr(value)
        if isinstance(value, int):
            return "i"
        if isinstance(value, slice):
            return ("s", kind(value.start), kind(value.stop), kind(value.step))
        # a long list of values is the end of a loop, not a part of it
        return tuple(map(kind, value)) if len(value) <= 32 else ("long", id(value))

    ids: dict[Any, int] = {}
    out = []
    for node in nodes:
        key = (node.op, str(node.target), kind(tuple(node.args)), tuple((k, kind(v)) for k, v in node.kwargs.items()))
        out.append(ids.setdefault(key, len(ids)))
    return out


def runs(nodes: list[fx.Node], after: int = 0) -> list[Run]:
    """Maximal repetitions, the longest first."""
    sequence = tokens(nodes)
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i, token in enumerate(sequence):
        if token in last:
            gaps[i - last[token]] += 1
        last[token] = i
    # a token may occur several times in a body; sums of neighbouring gaps are then the period
    common = [gap for gap, _ in gaps.most_common(8)]
    periods = {p for p in (*common, *(a + b for a in common for b in common)) if 2 <= p <= MAX_PERIOD}
    found: list[Run] = []
    for period in sorted(periods):
        i = after
        while i + period < len(sequence):
            if sequence[i] != sequence[i + period]:
                i += 1
                continue
            j = i
            while j + period < len(sequence) and sequence[j] == sequence[j + period]:
                j += 1
            steps = (j - i) // period + 1
            if steps >= MIN_STEPS and j - i >= period:
                found += [Run(i + shift, period, steps) for shift in range(min((j - i) % period + 1, 3))]
            i = j + 1
    return sorted(found, key=lambda r: (-r.period * r.steps, r.period, r.start))


def _segments(nodes: list[fx.Node], run: Run) -> list[list[fx.Node]]:
    return [nodes[run.start + k * run.period : run.start + (k + 1) * run.period] for k in range(run.steps)]


def _roll(graph: fx.Graph, nodes: list[fx.Node], run: Run) -> bool:
    """Replace a run by a loop, if its iterations really are the same computation."""
    segments = _segments(nodes, run)
    try:
        first = _first_regular(segments)
        segments = segments[first:]
        body = compare(segments[0], segments[1], None, set())
        if any(changes_mode(i.target) for i in body.instrs) or not body.carry_out:
            return False
        carries = body.carry_in
        for k in range(1, len(segments)):
            expected = [segments[k - 1][r.index] for r in body.carry_out]
            if bind(body, segments[k], k, set()) != expected:
                raise Unequal("a value of another iteration is used")
    except Unequal:
        return False
    return _emit(graph, body, segments, carries)


def _first_regular(segments: list[list[fx.Node]]) -> int:
    """The first iteration that the second one continues: a loop's first iteration is often special."""
    for first in range(min(2, len(segments) - MIN_STEPS + 1)):
        try:
            compare(segments[first], segments[first + 1], None, set())
            return first
        except Unequal:
            continue
    raise Unequal("no two iterations are alike")


def _emit(graph: fx.Graph, body: Body, segments: list[list[fx.Node]], carries: list[fx.Node]) -> bool:
    inside = {n for s in segments for n in s}
    lasts: list[Ref] = []
    stacks: list[Ref] = []
    place = {n: (k, i) for k, s in enumerate(segments) for i, n in enumerate(s)}
    final = len(segments) - 1
    for node in inside:
        step, position = place[node]
        if any(user not in inside for user in node.users):
            value = node.meta.get("example_value")
            if not isinstance(value, torch.Tensor):
                return False
            wanted = lasts if step == final and not _joined(node, inside) else stacks
            if Ref("node", position) not in wanted:
                wanted.append(Ref("node", position))
    after = segments[-1][-1].next
    writes, _ = body_writes(body.instrs)
    loop = Loop(
        body=tuple(body.instrs),
        steps=len(segments),
        carry_out=tuple(body.carry_out),
        lasts=tuple(lasts),
        stacks=tuple(stacks),
        slopes=tuple(body.slopes),
        writes=tuple(sorted(writes)),
        source=source_of(segments[0][0]),
        name=f"rerolled_loop_{segments[0][0].name}",
    )
    with graph.inserting_before(after):
        call = graph.call_function(loop, (tuple(carries), tuple(body.invs), tuple(body.bases)))
    call.meta["stack_trace"] = segments[0][0].meta.get("stack_trace")
    build = Builder(graph, after)
    outputs: dict[tuple[str, int], fx.Node] = {}
    for number, ref in enumerate((*lasts, *stacks)):
        kind = "last" if number < len(lasts) else "stack"
        with graph.inserting_before(after):
            out = graph.call_function(operator.getitem, (call, number))
        example = segments[-1][ref.index].meta["example_value"]
        with build.fake_mode or torch.no_grad(), torch.no_grad():
            shape = example.shape if kind == "last" else (len(segments), *example.shape)
            out.meta["example_value"] = torch.empty(shape, dtype=example.dtype, device=example.device)
        outputs[kind, ref.index] = out
    call.meta["example_value"] = tuple(out.meta["example_value"] for out in outputs.values())
    _redirect(graph, segments, place, inside, outputs)
    for node in sorted(inside, key=place.__getitem__, reverse=True):
        graph.erase_node(node)
    return True


def _joined(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether all outside users put the value into a list of one item an iteration."""
    users = [u for u in node.users if u not in inside]
    return all(u.target in (torch.stack, torch.cat) and isinstance(u.args[0], (list, tuple)) for u in users)


def _redirect(
    graph: fx.Graph,
    segments: list[list[fx.Node]],
    place: dict[fx.Node, tuple[int, int]],
    inside: set[fx.Node],
    outputs: dict[tuple[str, int], fx.Node],
) -> None:
    """Point the users outside of the loop to its outputs; a list with one item an iteration becomes one tensor."""
    users = list(dict.fromkeys(u for n in inside for u in n.users if u not in inside))
    for user in users:
        if user.target in (torch.stack, torch.cat) and isinstance(user.args[0], (list, tuple)):
            _join(graph, user, segments, place, outputs)
        for node in list(user.all_input_nodes):
            if node in inside:
                step, position = place[node]
                if (out := outputs.get(("last", position))) is None or step != len(segments) - 1:
                    build = Builder(graph, user)
                    out = build.call(torch.select, outputs["stack", position], 0, step)
                user.replace_input_with(node, out)


def _join(
    graph: fx.Graph,
    user: fx.Node,
    segments: list[list[fx.Node]],
    place: dict[fx.Node, tuple[int, int]],
    outputs: dict[tuple[str, int], fx.Node],
) -> None:
    items = list(user.args[0])
    dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
    steps = len(segments)
    start = next((i for i, n in enumerate(items) if n in place), None)
    if start is None or not isinstance(dim, int) or len(items) < start + steps:
        return
    position = place[items[start]][1]
    block = items[start : start + steps]
    if [place.get(n) for n in block] != [(k, position) for k in range(steps)] or ("stack", position) not in outputs:
        return
    build = Builder(graph, user)
    stacked = outputs["stack", position]
    rank = stacked.meta["example_value"].dim()
    if user.target is torch.stack:
        dim %= rank
        part = build.call(torch.movedim, stacked, 0, dim)
        rest = [
            build.call(torch.unsqueeze, n, dim) if isinstance(n, fx.Node) else n
            for n in items[:start] + items[start + steps :]
        ]
    else:
        dim %= rank - 1
        part = build.call(torch.flatten, build.call(torch.movedim, stacked, 0, dim), dim, dim + 1)
        rest = items[:start] + items[start + steps :]
    pieces = [*rest[:start], part, *rest[start:]]
    if len(pieces) == 1:
        joined = build.call(torch.clone, part, memory_format=torch.contiguous_format)
    else:
        joined = build.call(torch.cat, pieces, dim)
    user.replace_all_uses_with(joined)
    graph.erase_node(user)
