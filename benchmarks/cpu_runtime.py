"""Run time of a token loop on a CPU: eager, inductor, flashqla.

    python benchmarks/cpu_runtime.py [--quick]

Writes results/cpu_runtime.json. ``--quick`` leaves inductor out (it compiles for minutes).
"""

from __future__ import annotations

import argparse
import json

from _record import LOOPS, inputs, median_ms, run_apart, save, seconds, table

METHOD = (
    "Each row in a process of its own with an empty inductor cache, all rows in one run of the script, one CPU thread, "
    "batch 1, 4 heads of 64, float32. Median of up to 50 runs in 4 s after the first call. "
    "'step': forward and backward. Inductor runs at T=128, because it compiles for minutes; compare it per token."
)


def measure(row: dict[str, object]) -> dict[str, object]:
    import torch

    torch.set_num_threads(1)
    backend, T, step = str(row["backend"]), int(str(row["T"])), row["what"] == "step"
    fn, args = LOOPS["list_stack"], inputs(int(str(row["T"])), grad=step)
    compiled = fn if backend == "eager" else torch.compile(fn, backend=backend, fullgraph=True)

    def run() -> None:
        for x in args:
            x.grad = None
        out = compiled(*args)
        if step:
            out.sum().backward()

    with torch.set_grad_enabled(step):
        first = seconds(run)
        ms = median_ms(run)
    return {"first_s": round(first, 3), "ms": round(ms, 4), "us_per_token": round(1e3 * ms / T, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(json.loads(args.row))))
        return
    pairs = [("eager", 512), ("flashqla", 512), ("flashqla", 128), *([] if args.quick else [("inductor", 128)])]
    rows = [
        run_apart(__file__, {"what": what, "backend": backend, "T": T})
        for what in ("forward", "step")
        for backend, T in pairs
    ]
    table(rows, ["what", "backend", "T", "first_s", "ms", "us_per_token"])
    print(save("cpu_runtime", METHOD, rows))


if __name__ == "__main__":
    main()
