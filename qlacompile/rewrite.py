"""Replace a proven region by one operator: roles become its arguments, its results take the place of the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .build import Builder
from .effects import epochs, last_position, mode_switch, survivors, unsafe_reads
from .emission import Emission, cast_source, is_zero
from .functional import Functional
from .fxtools import target_name
from .ir import Placement, Refusal, Spec
from .recognise import Found


@dataclass
class Rewritten:
    """A region that was replaced: what the operator has to compute, its node, and what was absorbed into it."""

    spec: Spec
    node: fx.Node
    absorbed: tuple[str, ...]
    roles: dict[str, str]
    outputs: list[fx.Node] = field(default_factory=list)


def rewrite(gm: fx.GraphModule, functional: Functional, found: Found, training: bool) -> Rewritten | Refusal:
    """Rewrite ``gm.graph`` in place, or leave it as it is and say why."""
    graph = functional.source
    order = {n: i for i, n in enumerate(graph.nodes)}
    uses = _uses(functional, found)
    if isinstance(uses, Refusal):
        return uses
    core = {functional.origin[n] for n in found.core if n in functional.origin}
    role_nodes = [at.key for at in found.roles.values() if isinstance(at, Placement)]
    if found.step is not None:
        # the operator takes the loop's place: what the loop reads is what it would have read there
        at = functional.origin[found.anchor]
        moved = found.step.nodes[len(found.anchor.args[1]) :]  # read by the loop now, but computed before
        unsafe = unsafe_reads(functional, moved, at)
    else:
        inputs = [functional.origin[n] for n in (*role_nodes, *([found.state_in] if found.state_in else []))]
        at = last_position(inputs, order).next
        while at.op == "placeholder":
            at = at.next
        unsafe = unsafe_reads(functional, [*role_nodes, *([found.state_in] if found.state_in else [])], at)
    first, last = min((at, *core), key=order.__getitem__), max(core, key=order.__getitem__)
    unsafe = unsafe or mode_switch(functional, first, last)
    if unsafe is not None:
        return unsafe
    # what nothing needed before (a norm's running statistics, random numbers) is not ours to remove
    read = _read(functional, found)
    unneeded = survivors(functional, set(), core, read)[0] - _below(graph, core)
    dead, keeper = survivors(functional, {(user, used) for user, used, _ in uses}, core, read)
    if keeper is not None:
        from .roll.compare import source_of

        return Refusal(
            "QLA301",
            f"{keeper.name} also uses a value of the recurrence, so it has to be computed anyway",
            source_of(keeper) or found.source,
            found.family,
            "effects",
        )
    build = Builder(graph, at)
    build.stack_trace = functional.origin[found.anchor].meta.get("stack_trace")
    emitted = Emission(build, functional, found, epochs(graph), at)
    spec, call = emitted.operator(training)
    results: dict[str, fx.Node] = {}
    for user, used, which in uses:
        if which not in results:
            results[which] = emitted.result(which, call)
        user.replace_input_with(used, results[which])
    for node in reversed([n for n in graph.nodes if n in dead - unneeded]):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    return Rewritten(spec, call, tuple(emitted.absorbed), emitted.names, list(results.values()))


def _read(functional: Functional, found: Found) -> set[fx.Node]:
    """The source nodes that the operator's arguments are made of."""
    if found.step is None:
        nodes = [at.key for at in found.roles.values()]
    else:
        nodes = [n for j, n in enumerate(found.step.nodes) if j not in found.step.buffers]
    if found.state_in is not None and not is_zero(found.state_in):  # zeros are not passed on
        nodes.append(cast_source(found.state_in))
    return {functional.versions.get(n) or functional.origin[n] for n in nodes if isinstance(n, fx.Node)}


def _below(graph: fx.Graph, core: set[fx.Node]) -> set[fx.Node]:
    """The region's nodes and all that is computed from them."""
    found = set(core)
    for node in graph.nodes:
        if found & set(node.all_input_nodes):
            found.add(node)
    return found


def _uses(functional: Functional, found: Found) -> list[tuple[fx.Node, fx.Node, str]] | Refusal:
    """Every use of an output outside the region: (source user, source value, which output)."""
    which: dict[fx.Node, str] = {}
    for node in found.state_out:
        which[node] = "state"
    if isinstance(found.output, Placement):
        which[found.output.key] = "output"
    elif found.output is not None and found.step is not None:
        kind, number = found.output
        loop = found.step.loop
        for user in found.anchor.users:
            position = user.args[1]
            if (kind == "stack" and position == len(loop.lasts) + number) or (
                kind == "write"
                and position == len(loop.lasts) + len(loop.stacks) + loop.writes.index(found.step.written[number].inv)
            ):
                which[user] = "output"
            elif (
                position < len(loop.lasts)
                and loop.lasts[position] == found.step.output_refs[found.step.output_where.index(found.output)]
            ):
                which[user] = "last"
    uses: list[tuple[fx.Node, fx.Node, str]] = []
    core = set(found.core)
    for node, name in which.items():
        used = functional.versions.get(node) or functional.origin[node]
        for user in node.users:
            if user in core or user in which:
                continue
            origin = functional.origin.get(user)
            if origin is None:
                return Refusal("QLA302", "an output is written to later", found.source, found.family, "effects")
            if "hook" in target_name(user.target):
                return Refusal("QLA301", "a hook is registered on an output", found.source, found.family, "effects")
            uses.append((origin, used, name))
    # the output node of the source graph is not in the functional copy's origin when it was not copied
    return uses
