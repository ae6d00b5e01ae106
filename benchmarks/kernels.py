"""Times the Hopper kernels beside FLA's and FlashQLA's, in one run on one GPU, and writes the rows as JSON.

    python benchmarks/kernels.py OUT.json [--quick] [--date YYYY-MM-DD] [--no-peers]

Every number is the median over replays of a CUDA graph that holds ten calls, in milliseconds. A forward is everything
from q, k, v, g, beta and an initial state to o and the final state; a backward everything from there and the gradients
of both to all six gradients, with what the forward of that library keeps for it at hand (ours keeps nothing).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA must time its own kernels, not hand over to FlashQLA

import torch
import torch.nn.functional as F

from qlacompile.kernels.gdn_sm90 import KERNELS

D = 128
FORWARD = [
    ((16, 64), (1, 32768)),
    ((16, 64), (1, 8192)),
    ((16, 64), (4, 8192)),
    ((16, 64), (8, 1024)),
    ((16, 32), (1, 32768)),
    ((16, 32), (1, 8192)),
    ((16, 32), (4, 8192)),
    ((16, 32), (8, 1024)),
    ((4, 16), (1, 32768)),
    ((4, 16), (1, 8192)),
    ((4, 16), (8, 1024)),
]
BACKWARD = [row for row in FORWARD if row[0] == (16, 32)]
PACKAGES = ("torch", "triton", "tilelang", "fla-core", "flash-qla")
KERNEL = KERNELS[0]


def inputs(heads: tuple[int, int], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """bf16, normalised q and k, mild decay with every fourth head never forgetting."""
    (hk, hv), (B, T) = heads, shape
    torch.manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda")

    g = F.logsigmoid(randn(B, T, hv)) / 16
    g[:, :, torch.arange(hv) % 4 == 3] = 0
    return {
        "q": F.normalize(randn(B, T, hk, D), dim=-1).bfloat16(),
        "k": F.normalize(randn(B, T, hk, D), dim=-1).bfloat16(),
        "v": randn(B, T, hv, D).bfloat16(),
        "g": g,
        "beta": randn(B, T, hv).sigmoid(),
        "h0": randn(B, hv, D, D),
        "do": randn(B, T, hv, D).bfloat16(),
        "dht": randn(B, hv, D, D) / 8,
    }


def median_ms(call: Callable[[], Any], calls: int = 10, replays: int = 12) -> float:
    for _ in range(3):
        call()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return round(statistics.median(times), 4)


def ours(x: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    args = [x[n] for n in ("q", "k", "v", "g", "beta", "h0")]
    return (
        lambda: KERNEL.forward(*args, None, D**-0.5, None, torch.bfloat16),
        lambda: KERNEL.backward(*args, None, x["do"], x["dht"], D**-0.5, None, (True,) * 6),
    )


def fla(x: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    q, k, v, g, beta, h0 = (x[n] for n in ("q", "k", "v", "g", "beta", "h0"))

    def forward() -> Any:
        return chunk_gated_delta_rule_fwd(q, k, v, g, beta, D**-0.5, h0, True)

    gate, _, A, *_ = forward()
    kept = dict(q=q, k=k, v=v, g=gate, beta=beta, A=A, scale=D**-0.5, initial_state=h0, do=x["do"], dht=x["dht"])
    return forward, lambda: chunk_gated_delta_rule_bwd(**kept)


def flash_qla(x: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    B, T = x["v"].shape[:2]
    packed = {n: y.reshape(1, B * T, *y.shape[2:]) for n, y in x.items() if n not in ("h0", "dht")}
    q, k, v, g, beta = (packed[n] for n in ("q", "k", "v", "g", "beta"))
    bounds = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda")
    common = dict(scale=D**-0.5, initial_state=x["h0"], cu_seqlens=bounds)

    def forward() -> Any:
        return chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_final_state=True, **common)

    gate, A, *_ = forward()
    return forward, lambda: chunk_gated_delta_rule_bwd(q, k, v, gate, beta, A, packed["do"], x["dht"], **common)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="two shapes only")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--date", default="")
    options = parser.parse_args()
    makers = {"ours": ours} if options.no_peers else {"ours": ours, "fla": fla, "flash_qla": flash_qla}
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "versions": {p: version(p) for p in PACKAGES},
        "date": options.date,
        "method": "median of 12 replays of a CUDA graph of 10 calls, ms; bf16, K = V = 128, initial and final state",
        "rows": [],
    }
    for heads, shape in FORWARD[4:6] if options.quick else FORWARD:
        x = inputs(heads, shape)
        rows = [{"pass": "forward", "heads": heads, "batch": shape[0], "tokens": shape[1]}]
        if (heads, shape) in BACKWARD:
            rows.append({**rows[0], "pass": "backward"})
        for name, make in makers.items():
            try:
                calls = make(x)
            except Exception as error:
                calls = ()
                rows[0][name] = repr(error)[:200]
            for row, call in zip(rows, calls):
                try:
                    row[name] = median_ms(call)
                except Exception as error:
                    row[name] = repr(error)[:200]
        result["rows"] += rows
        for row in rows:
            print(row, flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
