"""Take off an operator's arguments what the operator does itself, where that is exact.

Transposes and copies (the operator takes any layout), up-casts (it computes in float32 anyway), repeated heads (it
knows grouped heads), a factor on q (the scale), and the l2norm of q and k when it is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .evaluate import op_name
from .norms import Peeled, l2norm, number_factor

_COPIES = frozenset(["contiguous", "clone", "alias"])
_CASTS = frozenset(["to", "float", "type", "type_as", "_to_copy"])


@dataclass
class Plan:
    roles: dict[str, Peeled]
    scale: float
    eps: float | None
    absorbed: list[str]


def peel(roles: dict[str, Peeled], scale: float, same_mode: Callable[[fx.Node], bool]) -> Plan:
    """The arguments with everything taken off that the operator does itself.

    ``same_mode(node)``: whether a node runs in the operator's own gradient and autocast modes; others are kept.
    """
    absorbed: list[str] = []
    out: dict[str, Peeled] = {}
    grouped: dict[str, tuple[Peeled, int]] = {}
    eps: float | None = None
    if "q" in roles and "k" in roles:
        q, factor = _layout(roles["q"], same_mode, factors=True)
        k, _ = _layout(roles["k"], same_mode)
        norm_q, norm_k = l2norm(q, same_mode), l2norm(k, same_mode)
        if norm_q is not None and norm_k is not None and abs(norm_q[1] - norm_k[1]) <= 1e-6 * norm_k[1]:
            q, more = _layout(norm_q[0], same_mode)
            k, _ = _layout(norm_k[0], same_mode)
            factor *= more
            eps = _round(norm_k[1])
            absorbed.append(f"l2norm of q and k (eps {eps:g})")
        scale *= factor
        for role, at in (("q", q), ("k", k)):
            grouped[role] = _ungroup(at, same_mode)
        if grouped["q"][1] == grouped["k"][1]:
            if grouped["q"][1] > 1:
                absorbed.append(f"heads of q and k repeated {grouped['q'][1]} times")
            out["q"], out["k"] = (_layout(grouped[r][0], same_mode)[0] for r in ("q", "k"))
        else:
            out["q"], out["k"] = q, k
    for role in ("v", "g", "beta"):
        if role in roles:
            out[role] = _layout(roles[role], same_mode)[0]
    before = {r: roles[r].node.meta["example_value"].dtype for r in out}
    after = {r: out[r].node.meta["example_value"].dtype for r in out}
    # the operator takes q, k and v in one precision; a cast that would have to be put back is not taken off
    if len({after[r] for r in ("q", "k", "v")}) > 1:
        widest = torch.promote_types(torch.promote_types(after["q"], after["k"]), after["v"])
        after = {r: widest if r in ("q", "k", "v") else after[r] for r in after}
    ups = [r for r in out if after[r].itemsize < before[r].itemsize]
    if ups:
        absorbed.append(f"up-cast of {', '.join(ups)}")
    return Plan(out, scale, eps, absorbed)


def _round(eps: float) -> float:
    """The short decimal that the eps was written as (it was measured through float64 arithmetic)."""
    short = float(f"{eps:.4g}")
    return short if abs(short - eps) <= 1e-5 * eps else eps


def _layout(at: Peeled, same_mode: Callable[[fx.Node], bool], factors: bool = False) -> tuple[Peeled, float]:
    """Behind transposes, copies, up-casts and, if ``factors``, multiplications by a number."""
    factor = 1.0
    while True:
        node = at.node
        if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
            return at, factor
        if not same_mode(node):
            return at, factor
        source, name = node.args[0], op_name(node.target)
        before, after = source.meta.get("example_value"), node.meta.get("example_value")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return at, factor
        if name in _COPIES or (name in _CASTS and _widens(before, after)) or _is_identity(node, name, before, after):
            at = replace(at, node=source)
            continue
        order = _order(node, name, before.dim())
        if order is not None:
            at = Peeled(
                source,
                None if at.batch is None else order[at.batch],
                order[at.time],
                None if at.head is None else order[at.head],
            )
            if order[-1] != before.dim() - 1 and after.dim() == before.dim():
                return _undo(at, node, order), factor
            continue
        number = number_factor(node, name) if factors else None
        if number is not None and before.dtype == after.dtype and before.dtype.itemsize >= 4:
            factor *= number
            at = replace(at, node=source)
            continue
        return at, factor


def _is_identity(node: fx.Node, name: str, before: torch.Tensor, after: torch.Tensor) -> bool:
    """A reshape, pad or slice that happens to change nothing, as when a length is a multiple of the chunk."""
    if before.dtype != after.dtype or before.dim() != after.dim():
        return False
    if any(a is not b and a != b for a, b in zip(before.shape, after.shape)):
        return False
    if name in (
        "reshape",
        "view",
        "expand",
        "flatten",
        "unflatten",
        "view_as",
        "reshape_as",
        "expand_as",
        "broadcast_to",
    ):
        return True
    if name in ("pad", "constant_pad_nd"):
        pads = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
        return isinstance(pads, (tuple, list)) and all(isinstance(p, int) and p == 0 for p in pads)
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(
            a is Ellipsis or (isinstance(a, slice) and a.start in (None, 0) and a.step in (None, 1)) for a in index
        )
    return False


def _undo(at: Peeled, node: fx.Node, order: list[int]) -> Peeled:
    """A transpose that moves the feature axis is kept."""
    inverse = {d: i for i, d in enumerate(order)}
    return Peeled(
        node,
        None if at.batch is None else inverse[at.batch],
        inverse[at.time],
        None if at.head is None else inverse[at.head],
    )


def _widens(before: torch.Tensor, after: torch.Tensor) -> bool:
    floating = before.dtype.is_floating_point and after.dtype.is_floating_point
    return (
        floating
        and before.device == after.device
        and before.dtype.itemsize <= after.dtype.itemsize
        and (before.dtype == after.dtype or before.dtype.itemsize < after.dtype.itemsize)
    )


def _order(node: fx.Node, name: str, rank: int) -> list[int] | None:
    """For a transposing node: which axis of its argument each of its axes is."""
    args: Any = node.args[1:]
    order = list(range(rank))
    if name in ("transpose", "swapaxes", "swapdims") and len(args) == 2 and all(isinstance(a, int) for a in args):
        i, j = args[0] % rank, args[1] % rank
        order[i], order[j] = order[j], order[i]
        return order
    if name == "permute":
        dims = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return [d % rank for d in dims] if all(isinstance(d, int) for d in dims) else None
    if name in ("movedim", "moveaxis") and len(args) == 2 and all(isinstance(a, int) for a in args):
        source = order.pop(args[0] % rank)
        order.insert(args[1] % rank, source)
        return order
    return None


def _ungroup(at: Peeled, same_mode: Callable[[fx.Node], bool]) -> tuple[Peeled, int]:
    """Behind a repetition of each head: (before it, how often)."""
    at = _layout(at, same_mode)[0]
    node = at.node
    if at.head is None or node.op not in ("call_function", "call_method") or not node.args or not same_mode(node):
        return at, 1
    name, source = op_name(node.target), node.args[0]
    if not isinstance(source, fx.Node):
        return at, 1
    before, after = source.meta.get("example_value"), node.meta["example_value"]
    if name == "repeat_interleave" and not set(node.kwargs) - {"dim", "repeats", "output_size"}:
        repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if isinstance(repeats, int) and isinstance(dim, int) and dim % before.dim() == at.head:
            return Peeled(source, at.batch, at.time, at.head), repeats
    if name in ("reshape", "view", "flatten"):
        # [.., H, D] -> [.., H, 1, D] -> [.., H, r, D] -> [.., H * r, D]
        expanded: Any = source
        while expanded.op in ("call_function", "call_method") and op_name(expanded.target) in ("contiguous", "clone"):
            expanded = expanded.args[0]
        wide = expanded.meta.get("example_value")
        if op_name(expanded.target) not in ("expand", "broadcast_to", "expand_as") or wide is None:
            return at, 1
        narrow = expanded.args[0]
        if not (same_mode(expanded) and same_mode(narrow)):
            return at, 1
        flat = narrow.meta.get("example_value")
        head = at.head
        if flat is None or flat.dim() != wide.dim() or wide.dim() != after.dim() + 1:
            return at, 1
        grown = [d for d in range(wide.dim()) if flat.shape[d] != wide.shape[d]]
        if (
            grown != [head + 1]
            or flat.shape[head + 1] != 1
            or after.shape[head] != wide.shape[head] * wide.shape[head + 1]
        ):
            return at, 1
        origin = narrow.args[0] if op_name(narrow.target) in ("unsqueeze", "getitem") else None
        inner = origin.meta.get("example_value") if isinstance(origin, fx.Node) else None
        expected = [s for d, s in enumerate(flat.shape) if d != head + 1]
        if inner is not None and list(inner.shape) == expected and isinstance(origin, fx.Node):
            return Peeled(origin, at.batch, at.time, at.head), int(wide.shape[head + 1])
    return at, 1
