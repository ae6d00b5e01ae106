"""Building kernels ahead of their first use (rank 0 of a job, or the making of a container image). Needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from .launch import NAMES, build, variants

DEFAULT = tuple((K, dtype) for K in (128, 64) for dtype in (torch.bfloat16, torch.float16))


def warm(
    configs: Iterable[tuple[int, torch.dtype]] = DEFAULT, report: Callable[[str], None] | None = None
) -> dict[str, float]:
    """Build every variant for the given ``(key size, dtype)`` pairs; returns seconds per variant.

    Variants do not depend on anything else: not on the value size, the batch, the length or the head counts.
    """
    seconds: dict[str, float] = {}
    for K, dtype in configs:
        for key in variants(K, NAMES[dtype]):
            start = time.perf_counter()
            build(*key)
            name = " ".join(str(part) for part in key)
            seconds[name] = time.perf_counter() - start
            if report is not None:
                report(f"{name}: {seconds[name]:.1f} s")
    return seconds
