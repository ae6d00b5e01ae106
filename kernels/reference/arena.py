"""One allocation for all large temporaries of a call.

The C library gives memory back to the system when much of it is freed at once, and the next call then pays for every
page again: with one tensor per temporary that was half of the time of a short sequence. Freeing one block of several
megabytes makes it raise the limit for good; blocks beyond its largest limit would be given back each time.
"""

from __future__ import annotations

import math

import torch

_LARGEST_BLOCK = 16 << 20  # bytes; the limit of glibc can rise to 32 MiB


class Arena:
    """Hands out uninitialised tensors of one dtype from one block."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, elements: int) -> None:
        fits = elements * dtype.itemsize <= _LARGEST_BLOCK
        self._free = like.new_empty(elements if fits else 0, dtype=dtype)

    def take(self, *shape: int) -> torch.Tensor:
        """A contiguous tensor; on its own if the block is used up, so a wrong estimate only costs time."""
        elements = math.prod(shape)
        if elements > self._free.numel():
            return self._free.new_empty(shape)
        taken, self._free = self._free.split([elements, self._free.numel() - elements])
        return taken.view(shape)
