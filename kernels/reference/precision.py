"""The precision that the portable kernel computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ROUNDED = ("tf32", "bf16")


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype is torch.float64 for t in tensors) else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device, for the sums of log decays (MPS has no float64)."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever ``torch.set_float32_matmul_precision`` says.

    The triangular inverse and the state sum over the whole sequence: rounding their factors to tf32 or bf16 would round
    every step that leads to the result, not only the result.
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    saved = [(backend, backend.fp32_precision) for backend in backends]
    changed = [(backend, value) for backend, value in saved if value in _ROUNDED]
    try:
        for backend, _ in changed:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, value in changed:
            backend.fp32_precision = value
