"""What the CPU benchmarks share: the token loop, a process and a cache of its own for each row, and rows as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def run_apart(script: str, row: dict[str, Any]) -> dict[str, Any]:
    """Run ``script --row ROW`` in a new process with an empty inductor cache; returns the row with what it measured."""
    label = " ".join(str(value) for value in row.values())
    print(f"  {label} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, script, "--row", json.dumps(row)], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def machine() -> dict[str, Any]:
    import torch

    import qlacompile

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qlacompile": qlacompile.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, method: str, rows: list[dict[str, Any]]) -> Path:
    """Write ``results/NAME.json``: the machine, the method in words, the rows."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"machine": machine(), "method": method, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    return path


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """A Markdown table, as README.md shows it."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        print("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")


def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def median_ms(fn: Callable[[], Any], budget: float = 4.0) -> float:
    """Median of up to 50 runs within ``budget`` seconds, three at least; the caller has run it once before."""
    times = [seconds(fn) for _ in range(3)]
    while sum(times) < budget and len(times) < 50:
        times.append(seconds(fn))
    return 1e3 * statistics.median(times)


def inputs(T: int, heads: int = 4, dim: int = 64, grad: bool = False) -> tuple[Any, ...]:
    """q, k, v ``[1,T,heads,dim]``, g and beta ``[1,T,heads]``; float32."""
    import torch

    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, dim, generator=gen) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(1, T, heads, generator=gen), torch.rand(1, T, heads, generator=gen)
    return tuple(x.requires_grad_(grad) for x in (q, k, v, g, beta))


def list_stack(q, k, v, g, beta):
    import torch

    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1)


def preallocated(q, k, v, g, beta):
    import torch

    S = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = (v[:, t] - (S * k[:, t].unsqueeze(-1)).sum(-2)) * beta[:, t].unsqueeze(-1)
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        o[:, t] = (S * (q[:, t] * q.shape[-1] ** -0.5).unsqueeze(-1)).sum(-2)
    return o


LOOPS = {"list_stack": list_stack, "preallocated": preallocated}
