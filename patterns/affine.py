"""A loop step as an affine map of its state, recovered by probing: S' = M S + N and o = S^T w + o0, per batch element.

The step is a black box that can be run on any state. With the state's key axis first and value axis second, a step that
acts on the key axis only is determined by its values on zero and on the unit vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qlacompile.ir import StepView

TOLERANCE = 1e-10


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Equal up to float64 rounding, relative to the largest entry."""
    return error(a, b) <= tolerance


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|; infinite if something is not finite."""
    difference = (a - b).abs().max().item() if a.numel() else 0.0
    size = max(b.abs().max().item(), a.abs().max().item()) if a.numel() else 1.0
    if difference != difference or size == float("inf"):
        return float("inf")
    return difference / size if size > 0 else difference


@dataclass
class Output:
    """One per-step output: ``o = S^T weights + offset`` with ``weights`` ``[N, K]`` and ``offset`` ``[N, V]``."""

    index: int
    weights: torch.Tensor
    offset: torch.Tensor


@dataclass
class Affine:
    """``transition`` M ``[N, K, K]`` and ``write`` N ``[N, K, V]``, with the batch axes flattened to N."""

    batch: tuple[int, ...]
    transition: torch.Tensor
    write: torch.Tensor
    outputs: list[Output]


def orientations(rank: int) -> Iterator[tuple[int, int]]:
    """(key axis, value axis), the usual ones first."""
    pairs = [(i, j) for i in range(rank) for j in range(rank) if i != j]
    yield from sorted(pairs, key=lambda p: (-(min(p) + max(p)), p[0] > p[1]))


def canonical_state(state: torch.Tensor, key_axis: int, value_axis: int) -> torch.Tensor:
    """``[N, K, V]``"""
    batch = [d for d in range(state.dim()) if d not in (key_axis, value_axis)]
    moved = state.permute(*batch, key_axis, value_axis)
    return moved.reshape(-1, *moved.shape[-2:])


def restore_state(state: torch.Tensor, shape: tuple[int, ...], key_axis: int, value_axis: int) -> torch.Tensor:
    """The inverse of :func:`canonical_state`."""
    batch = [d for d in range(len(shape)) if d not in (key_axis, value_axis)]
    order = [*batch, key_axis, value_axis]
    moved = state.reshape([shape[d] for d in order])
    inverse = [order.index(d) for d in range(len(shape))]
    return moved.permute(inverse)


def aligned(value: torch.Tensor, batch: tuple[int, ...], last: int | None) -> torch.Tensor | None:
    """``value`` as ``[N, last]`` (or ``[N]``), if it has these axes up to axes of size one or missing leading ones."""
    wanted = [s for s in (*batch, *(() if last is None else (last,))) if s != 1]
    have = [s for s in value.shape if s != 1]
    if len(have) > len(wanted) or have != wanted[len(wanted) - len(have) :]:
        return None
    if last is not None and last != 1 and not have:
        return None
    full = tuple(wanted)
    out = value.reshape(have).expand(full)
    count = 1
    for s in batch:
        count *= s
    return out.reshape((count,) if last is None else (count, last))


def decompose(view: StepView, trial: int, key_axis: int, value_axis: int) -> Affine | None:
    """The step as an affine map on the key axis, or None if it is not one."""
    shape = view.state_shape
    keys, values = shape[key_axis], shape[value_axis]
    batch = tuple(s for d, s in enumerate(shape) if d not in (key_axis, value_axis))
    count = 1
    for s in batch:
        count *= s

    def run(state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        new, outs = view.run(restore_state(state, shape, key_axis, value_axis).contiguous(), trial)
        if tuple(new.shape) != shape:
            raise ValueError("the state changes its shape")
        return canonical_state(new, key_axis, value_axis), [aligned(o, batch, values) for o in outs]

    device = view.values(trial)[0].data.device if view.values(trial) else torch.device("cpu")
    zero = torch.zeros(count, keys, values, dtype=torch.float64, device=device)
    write, offsets = run(zero)
    if not torch.isfinite(write).all():
        return None
    transition = torch.empty(count, keys, keys, dtype=torch.float64, device=device)
    weights = [torch.empty(count, keys, dtype=torch.float64, device=device) for _ in offsets]
    for start in range(0, keys, values):
        width = min(values, keys - start)
        probe = zero.clone()
        for c in range(width):
            probe[:, start + c, c] = 1.0
        new, outs = run(probe)
        transition[:, :, start : start + width] = (new - write)[:, :, :width]
        for w, o, offset in zip(weights, outs, offsets):
            if o is not None and offset is not None:
                w[:, start : start + width] = (o - offset)[:, :width]
    generator = torch.Generator().manual_seed(1000 + trial)
    for size in (1.0, 37.0):
        state = (torch.rand(zero.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(device) * size
        new, outs = run(state)
        if not close(new, transition @ state + write):
            return None
        for i, (w, o, offset) in enumerate(zip(weights, outs, offsets)):
            if o is not None and offset is not None and not close(o, (w.unsqueeze(1) @ state).squeeze(1) + offset):
                offsets[i] = None
    outputs = [Output(i, w, o) for i, (w, o) in enumerate(zip(weights, offsets)) if o is not None]
    return Affine(batch, transition, write, outputs)


def ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """``c`` with ``a = c b`` for each batch element (``[N]``), or None if they are not parallel. ``a``, ``b``: ``[N,
    D]``."""
    norm = (b * b).sum(-1)
    if not bool((norm > 1e-30).all()):
        return None
    c = (a * b).sum(-1) / norm
    return c if close(c.unsqueeze(-1) * b, a) else None


def constant(c: torch.Tensor) -> float | None:
    """The one value of all entries, or None."""
    first = c.flatten()[0].item()
    return first if bool(((c - first).abs() <= TOLERANCE * abs(first)).all()) and first != 0 else None
