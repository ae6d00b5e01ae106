"""Take what a loop step reads or computes at index t out of the loop: the same for all t at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .access import Indexed
from .build import Builder
from .ir import Ref, call_instr, resolve
from .norms import Peeled
from .steps import LoopStep


def hoist(build: Builder, step: LoopStep, invs: list[fx.Node], ref: Ref, features: bool) -> Peeled:
    """A state-independent value of the step for all steps: a node and where its batch, time and head axes are.

    ``invs`` are the nodes of the loop's invariants.
    """
    if ref.kind == "node" and ref.index in step.reads:
        access = step.reads[ref.index]
        plain = _plain(step, access, invs[access.inv], features)
        if plain is not None:
            return plain
        return _canonical(build, step, _sliced(build, step, access, invs[access.inv]), features)
    return _canonical(build, step, _mapped(build, step, invs, ref), features)


def _plain(step: LoopStep, access: Indexed, node: fx.Node, features: bool) -> Peeled | None:
    """The tensor itself, if the loop reads all of it in order and its other axes are just batch, head and feature."""
    shape = list(node.meta["example_value"].shape)
    if access.base != 0 or access.slope != 1 or access.kept or shape[access.axis] != step.loop.steps:
        return None
    others = (a for i, a in enumerate(access.index) if i != access.entry and a is not None)
    if any(not (isinstance(a, slice) and a == slice(None)) for a in others):
        return None
    rest = [d for d in range(len(shape)) if d != access.axis]
    batch = len(step.state_shape) - 2
    if len(rest) != batch + (1 if features else 0) or batch > 2:
        return None
    names = [None, None, *rest[:batch]][-2:]
    return Peeled(node, names[0], access.axis, names[1])


def _sliced(build: Builder, step: LoopStep, access: Indexed, node: fx.Node) -> fx.Node:
    """``[T, *what the step reads]``"""
    import operator

    steps = step.loop.steps
    last = access.base + access.slope * (steps - 1)
    low, high = min(access.base, last), max(access.base, last) + 1
    index = list(access.index)
    index[access.entry] = slice(low, high, abs(access.slope))
    node = build.call(operator.getitem, node, tuple(index))
    node = build.call(torch.movedim, node, access.position, 0)
    if access.slope < 0:
        node = build.call(torch.flip, node, [0])
    if access.kept:
        node = build.call(torch.unsqueeze, node, access.position + 1)
    return node


def _mapped(build: Builder, step: LoopStep, invs: Any, ref: Ref) -> fx.Node:
    """A value that the step computes from its reads, for all steps: the same operations under vmap, as ATen nodes."""
    if ref.kind == "inv":
        node = build.call(torch.unsqueeze, invs[ref.index], 0)
        return build.call(torch.expand_copy, node, [step.loop.steps, *build.shape(invs[ref.index])])
    which = step.slice_for(ref)
    reads = [i for i in which if i in step.reads]
    used = sorted(
        {r.index for i in which if i not in step.reads for r in _refs(step, i) if r.kind == "inv"},
    )
    stacked = [_sliced(build, step, step.reads[i], invs[step.reads[i].inv]) for i in reads]
    whole = [invs[j] for j in used]

    def one(*values: torch.Tensor) -> torch.Tensor:
        env: dict[Ref, Any] = {Ref("int", j): base for j, base in enumerate(step.bases)}
        env.update({Ref("node", i): value for i, value in zip(reads, values)})
        env.update({Ref("inv", j): value for j, value in zip(used, values[len(reads) :])})
        for i in which:
            if Ref("node", i) in env:
                continue
            instr = step.loop.body[i]
            args = resolve(instr.args, env.__getitem__)
            kwargs = {key: resolve(value, env.__getitem__) for key, value in instr.kwargs}
            env[Ref("node", i)] = call_instr(instr, args, kwargs)
        return env[ref]

    tensors = [n for n in (*stacked, *whole) if isinstance(n, fx.Node)]
    examples = [n.meta["example_value"] for n in tensors]
    axes = (*[0] * len(stacked), *[None] * len(whole))
    mapped = torch.vmap(one, in_dims=axes) if stacked else one
    with build.fake_mode or torch.no_grad(), torch.no_grad():
        traced = make_fx(mapped)(*examples)
    # torch 2.14 traces detach as alias, which would let the gradient through again
    detached = sum("detach" in str(step.loop.body[i].target) for i in which if i not in step.reads)
    aliases = sum(node.target is torch.ops.aten.alias.default for node in traced.graph.nodes)
    if detached and aliases not in (0, detached):
        raise ValueError("a detached value and another alias inside the step")
    env: dict[fx.Node, Any] = {}
    inputs = iter(tensors)
    result: Any = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            cut = detached and node.target is torch.ops.aten.alias.default
            env[node] = build.call(torch.ops.aten.detach.default if cut else node.target, *args, **kwargs)
        elif node.op == "get_attr":
            raise ValueError("a constant tensor inside the step")
        else:
            result = env[node.args[0]]
    if not stacked:
        result = build.call(torch.unsqueeze, result, 0)
        result = build.call(torch.expand_copy, result, [step.loop.steps, *build.shape(result)[1:]])
    return result


def _refs(step: LoopStep, i: int) -> list[Ref]:
    from .ir import refs_in

    instr = step.loop.body[i]
    return refs_in((instr.args, dict(instr.kwargs)))


def _canonical(build: Builder, step: LoopStep, node: fx.Node, features: bool) -> Peeled:
    """``[T, *axes]`` as ``[T, B, H(, D)]``, with missing axes of the state's batch expanded."""
    shape = build.shape(node)
    key_axis, value_axis = step.axes
    batch = [s for d, s in enumerate(step.state_example.shape) if d not in (key_axis, value_axis)]
    batch = [1] * (2 - len(batch)) + batch if len(batch) < 2 else [batch[0], _product(batch[1:])]
    last = [shape[-1] if shape[-1] != 1 else next((s for s in reversed(shape[1:]) if s != 1), 1)] if features else []
    have = [s for s in shape[1:] if not (isinstance(s, int) and s == 1)]
    want = [s for s in (*batch, *last) if not (isinstance(s, int) and s == 1)]
    if len(have) < len(want):
        missing = want[: len(want) - len(have)]
        full = [*batch, *last]
        start = build.fit(node, [shape[0], *[1 if s in missing else s for s in full]])
        return Peeled(build.call(torch.expand_copy, start, [shape[0], *full]), 1, 0, 2)
    return Peeled(build.fit(node, [shape[0], *batch, *last]), 1, 0, 2)


def _product(sizes: list[Any]) -> Any:
    total = 1
    for s in sizes:
        total = total * s
    return total
