"""The gated delta rule on Hopper GPUs (compute capability 9.0), in TileLang; kernels/README.md has a section on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from qlacompile.ir import Spec

__all__ = ["KERNELS", "GdnSm90"]

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
TILELANG = "0.1.15"  # the compiler the kernels were checked with; others are known to hang or to miscompile
MAX_GRID = 65535


def tilelang_version() -> str | None:
    """The installed version of TileLang, without importing it (a broken one can abort the process)."""
    if importlib.util.find_spec("tilelang") is None:
        return None
    try:
        return importlib.metadata.version("tilelang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class GdnSm90:
    """The :class:`qlacompile.ir.Kernel` of this folder. Nothing is imported or built before the first call."""

    name: str = "gdn_sm90"
    family: str = "gated_delta_rule"
    version: int = 1
    priority: int = 10

    def supports(self, spec: Spec) -> tuple[str, str] | None:
        if spec.device.type != "cuda":
            return "QLA501", f"runs on CUDA devices of compute capability 9.0, the tensors are on {spec.device}"
        found = torch.cuda.get_device_capability(spec.device)
        if found != CAPABILITY:
            return "QLA501", f"runs on compute capability 9.0, {spec.device} has {found[0]}.{found[1]}"
        if spec.dtype not in DTYPES:
            return "QLA502", f"takes bfloat16 and float16, q, k and v are {str(spec.dtype).removeprefix('torch.')}"
        if spec.key_dim not in HEAD_DIMS or spec.value_dim not in HEAD_DIMS:
            return "QLA503", f"takes key and value sizes 64 and 128, found {spec.key_dim} and {spec.value_dim}"
        if spec.packed:
            return "QLA504", "does not take packed sequences (cu_seqlens) yet"
        if max(spec.batch, spec.v_heads) > MAX_GRID:
            return "QLA504", f"takes up to {MAX_GRID} sequences and v heads, found {spec.batch} and {spec.v_heads}"
        if spec.k_heads < 1 or spec.v_heads % spec.k_heads:
            return "QLA504", f"takes v heads in multiples of k heads, found {spec.v_heads} and {spec.k_heads}"
        version = tilelang_version()
        if version is None:
            return "QLA505", f"needs TileLang {TILELANG} (pip install 'qlacompile[hopper]'), which is not installed"
        if version != TILELANG:
            return "QLA505", f"needs TileLang {TILELANG}, found {version}"
        return None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from .launch import forward

        return forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        from .launch import backward

        return backward(*args, **kwargs)


KERNELS = [GdnSm90()]
