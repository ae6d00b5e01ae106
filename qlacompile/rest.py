"""Hand a graph on to what compiles the rest, and put loops that stayed rolled back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .ir import Loop, Ref, resolve


def unroll(gm: fx.GraphModule) -> int:
    """Replace every rolled loop by its iterations, nested ones too; returns how many there were."""
    count = 0
    while loops := [n for n in gm.graph.nodes if isinstance(n.target, Loop)]:
        for node in loops:
            _unroll_one(gm.graph, node)
            count += 1
    return count


def _unroll_one(graph: fx.Graph, node: fx.Node) -> None:
    loop = node.target
    assert isinstance(loop, Loop)
    carries, invs, bases = node.args
    env: dict[Ref, Any] = {Ref("inv", j): value for j, value in enumerate(invs)}
    current = list(carries)
    stacks: list[list[fx.Node]] = [[] for _ in loop.stacks]
    trace = node.meta.get("stack_trace")
    with graph.inserting_before(node):
        for i in range(loop.steps):
            env.update({Ref("carry", j): value for j, value in enumerate(current)})
            for j, (base, slope) in enumerate(zip(bases, loop.slopes)):
                env[Ref("int", j)] = _at(graph, base, slope * i)
            for j, instr in enumerate(loop.body):
                args = resolve(instr.args, env.__getitem__)
                kwargs = {key: resolve(value, env.__getitem__) for key, value in instr.kwargs}
                made = graph.create_node(instr.op, instr.target, args, kwargs)
                if trace:
                    made.meta["stack_trace"] = trace
                env[Ref("node", j)] = made
            current = [env[ref] for ref in loop.carry_out]
            for stack, ref in zip(stacks, loop.stacks):
                stack.append(env[ref])
        results = [env[ref] for ref in loop.lasts]
        for user in list(node.users):
            number = user.args[1]
            if number < len(results):
                user.replace_all_uses_with(results[number])
            elif user.users:
                _restack(graph, user, stacks[number - len(results)])
            graph.erase_node(user)
    graph.erase_node(node)


def _restack(graph: fx.Graph, stacked: fx.Node, items: list[fx.Node]) -> None:
    """Items go back to where they are used: one by one, or in the torch.stack that the user wrote."""
    import operator

    for user in list(stacked.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            user.replace_all_uses_with(items[user.args[1]])
            graph.erase_node(user)
        elif user.target is torch.movedim and len(user.users) == 1:
            (clone,) = user.users
            if clone.target is torch.clone:
                with graph.inserting_before(clone):
                    joined = graph.call_function(torch.stack, (items, user.args[2]))
                joined.meta = clone.meta
                clone.replace_all_uses_with(joined)
                graph.erase_node(clone)
                graph.erase_node(user)
    if stacked.users:
        with graph.inserting_before(stacked):
            joined = graph.call_function(torch.stack, (items,))
        joined.meta = stacked.meta
        stacked.replace_all_uses_with(joined)


def _at(graph: fx.Graph, base: Any, offset: int) -> Any:
    if isinstance(base, fx.Node):
        import operator

        return graph.call_function(operator.add, (base, offset)) if offset else base
    return base + offset


def compile_rest(
    gm: fx.GraphModule, example_inputs: list[Any], how: str, mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """``how``: "inductor" (with the user's own mode and options), "aot_eager" or "eager"."""
    if how == "eager":
        return gm.forward
    if how == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, example_inputs)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    return compile_fx(  # type: ignore[return-value]
        gm, example_inputs, config_patches=patches or None
    )
