"""Tokens to chunks and back: the one place that knows about batches, padding and packed sequences.

A chunk holds ``chunk`` consecutive tokens of one sequence. Chunks are ordered by their position in their sequence first
("step") and by sequence second, so that a step of the scan over chunks is one slice. Sequences are ordered by falling
number of chunks: those that are still running in a step are a prefix of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_CHUNK = 64


@dataclass(frozen=True)
class Layout:
    """Where each token lives. ``M`` is the number of chunks, ``N`` of sequences."""

    chunk: int
    counts: tuple[int, ...]  # sequences that are running in each step, never growing; sums to M
    batch: int
    tokens: int
    order: torch.Tensor | None = None  # packed: [N] the sequence at each place
    slots: torch.Tensor | None = (
        None  # packed: [M * chunk] the row of each slot; a padding slot repeats a row of its own
    )
    padding: torch.Tensor | None = None  # packed: [M * chunk, 1, 1] bool
    kept: torch.Tensor | None = None  # packed: the slots that are not padding

    @property
    def chunks(self) -> int:
        return sum(self.counts)

    def load(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        """``scale * x [B, T, H, D]`` to ``out [M, H, chunk, D]``; padding becomes zero, whatever lies there."""
        if self.slots is not None:
            rows = x[0].index_select(0, self.slots)
            if self.padding is not None:
                rows = rows.masked_fill_(self.padding, 0)
            _copy(rows.unflatten(0, (-1, self.chunk)).transpose(1, 2), out, scale)
            return
        _, _, heads, width = x.shape
        out = out.view(len(self.counts), self.batch, heads, self.chunk, width)
        full, rest = divmod(self.tokens, self.chunk)
        if rest == 0:
            _copy(x.view(self.batch, full, self.chunk, heads, width).permute(1, 0, 3, 2, 4), out, scale)
            return
        if full:
            head = x[:, :-rest].view(self.batch, full, self.chunk, heads, width)
            _copy(head.permute(1, 0, 3, 2, 4), out[:full], scale)
        _copy(x[:, -rest:].transpose(1, 2), out[full, :, :, :rest], scale)
        out[full, :, :, rest:].zero_()

    def store(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``x [M, H, chunk, D]`` to a new contiguous ``[B, T, H, D]``; rows of no sequence become zero."""
        heads, width = x.shape[1], x.shape[3]
        if self.slots is not None:
            out = x.new_zeros((self.batch, self.tokens, heads, width), dtype=dtype)
            rows, slots = x.transpose(1, 2).reshape(-1, heads, width), self.slots
            if self.kept is not None:
                rows, slots = rows.index_select(0, self.kept), slots.index_select(0, self.kept)
            out[0].index_copy_(0, slots, rows.to(dtype))
            return out
        out = x.new_empty((self.batch, self.tokens, heads, width), dtype=dtype)
        x = x.view(len(self.counts), self.batch, heads, self.chunk, width)
        full, rest = divmod(self.tokens, self.chunk)
        if full:
            head = out[:, : self.tokens - rest].view(self.batch, full, self.chunk, heads, width)
            head.permute(1, 0, 3, 2, 4).copy_(x[:full])
        if rest:
            out[:, -rest:].transpose(1, 2).copy_(x[full, :, :, :rest])
        return out

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """``x [N, ...]`` from the caller's order of sequences to the layout's."""
        return x if self.order is None else x.index_select(0, self.order)

    def unsort(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`sort`."""
        return x if self.order is None else torch.empty_like(x).index_copy_(0, self.order, x)


def _copy(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    if scale == 1:
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.mul(x, scale, out=out)
    else:  # the product must not be rounded to the dtype of x
        out.copy_(x).mul_(scale)


def chunk_length(longest: int) -> int:
    """The length of a chunk: the longest sequence in equal parts, and in whole vectors of 8."""
    parts = -(-longest // LARGEST_CHUNK)
    length = -(-longest // parts)
    return length if length <= 8 else min(LARGEST_CHUNK, -(-length // 8) * 8)


def dense_layout(batch: int, tokens: int) -> Layout:
    """The layout of a batch of equally long sequences; ``batch`` and ``tokens`` are positive."""
    chunk = chunk_length(tokens)
    return Layout(chunk, (batch,) * -(-tokens // chunk), batch, tokens)


def packed_layout(cu_seqlens: torch.Tensor, tokens: int) -> Layout:
    """The layout of packed sequences. Reads ``cu_seqlens`` on the host, which waits for the device."""
    device = cu_seqlens.device
    bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
    starts, lengths = bounds[:-1], bounds.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    if longest == 0:
        return Layout(1, (), 1, tokens)
    chunk = chunk_length(longest)
    parts = (lengths + chunk - 1).div(chunk, rounding_mode="floor")
    order = parts.argsort(descending=True, stable=True)
    steps = torch.arange(int(parts.max()))
    counts = len(parts) - torch.bincount(parts).cumsum(0)[:-1]  # sequences with more than s chunks
    place = torch.cat([torch.arange(n) for n in counts.tolist()])
    step = steps.repeat_interleave(counts)
    first = starts[order][place] + step * chunk
    rows = first.unsqueeze(1) + torch.arange(chunk)
    padding = rows >= (starts + lengths)[order][place].unsqueeze(1)
    rows = torch.where(padding, first.unsqueeze(1), rows).flatten()
    padded = bool(padding.any())
    return Layout(
        chunk,
        tuple(counts.tolist()),
        1,
        tokens,
        order.to(device),
        rows.to(device),
        padding.view(-1, 1, 1).to(device) if padded else None,
        padding.flatten().logical_not().nonzero().flatten().to(device) if padded else None,
    )
