"""``warm``: build kernels before they are needed, for an image or before the first step of a job."""

from __future__ import annotations

import argparse
import time

import torch

from .console import Console, UsageError


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    configs = [(key_dim, _dtype(name)) for key_dim in args.key_dims for name in args.dtypes]
    reason = _cannot_build()
    if reason is not None:
        console.say(f"nothing to build: {reason}. The portable kernel needs no building.")
        console.document({"built": {}, "reason": reason})
        return 0
    from ..kernels.gdn_sm90.warm import warm

    start = time.perf_counter()
    with console.progress(f"building kernels for {len(configs)} configurations"):
        built = warm(configs, report=console.say)
    console.say(
        f"{len(built)} kernels in {time.perf_counter() - start:.1f} s; the next process loads them from the cache"
    )
    console.document({"built": built, "seconds": time.perf_counter() - start})
    return 0


def _cannot_build() -> str | None:
    """The compiler, and a GPU or at least nvcc; else there is nothing that could use or make the kernels."""
    from ..kernels.gdn_sm90 import TILELANG, tilelang_version

    version = tilelang_version()
    if version is None:
        return f"TileLang {TILELANG} is not installed (pip install 'qlacompile[hopper]')"
    if version != TILELANG:
        return f"TileLang {version} is installed, the kernels were checked with {TILELANG}"
    if not torch.cuda.is_available():
        return "this machine has no GPU"
    return None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(f"--dtypes: found {name!r}, expected bfloat16 or float16")
    return dtype
