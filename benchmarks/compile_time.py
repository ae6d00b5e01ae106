"""Seconds until a token loop can run: what tracing and rewriting cost by length, and first calls beside inductor's.

    python benchmarks/compile_time.py [--quick]

Writes results/compile_time.json. ``--quick`` leaves inductor out (minutes).
"""

from __future__ import annotations

import argparse
import json

from _record import LOOPS, inputs, run_apart, save, seconds, table

METHOD = (
    "Each row in a process of its own with an empty inductor cache, one CPU thread, batch 1, 4 heads of 64, float32, "
    "no gradient. 'rewrite': from the call of the compiled function to its first result with the rest run eagerly, so "
    "tracing, rolling, recognising, proving and rewriting, and one run of the operator; the stages are the backend's "
    "own clocks and the trace is what remains of the whole. 'second length': the same for the second length that one "
    "compiled function is called with, where torch makes the length symbolic. "
    "'first call': with inductor for the rest, as users run it."
)
STAGES = ("recognise", "prove", "rewrite", "lower")


def measure(row: dict[str, object]) -> dict[str, object]:
    import torch

    from qlacompile.explain.collect import collecting

    torch.set_num_threads(1)
    fn, args = LOOPS[str(row["loop"])], inputs(int(str(row["T"])))
    backend = str(row["backend"])
    options = None if row["what"] == "first call" else {"flashqla.rest": "eager"}
    compiled = torch.compile(fn, backend=backend, options=options, fullgraph=True)
    if row["what"] == "rewrite":  # what the process pays once, whatever it compiles
        other = next(loop for loop in LOOPS.values() if loop is not fn)
        with torch.no_grad():
            torch.compile(other, backend=backend, options=options, fullgraph=True)(*inputs(16))
    if row["what"] == "second length":
        with torch.no_grad():
            compiled(*inputs(int(str(row["T"])) - 32))
    with collecting() as found, torch.no_grad():
        total = seconds(lambda: compiled(*args))
        run = seconds(lambda: compiled(*args))
    result: dict[str, object] = {"seconds": round(total, 3), "run_s": round(run, 4)}
    if backend == "flashqla":
        assert len(found.matches) == 1, "the loop was not matched"
        stages = {name: round(found.seconds.get(name, 0.0), 4) for name in STAGES}
        result |= {"trace_s": round(total - sum(found.seconds.values()) - run, 3), **stages}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(json.loads(args.row))))
        return
    wanted = [
        {"what": "rewrite", "loop": loop, "backend": "flashqla", "T": T} for loop in LOOPS for T in (128, 4096, 16384)
    ]
    wanted += [{"what": "second length", "loop": "list_stack", "backend": "flashqla", "T": 128}]
    wanted += [{"what": "first call", "loop": "list_stack", "backend": "flashqla", "T": T} for T in (128, 4096, 16384)]
    if not args.quick:
        wanted += [{"what": "first call", "loop": "list_stack", "backend": "inductor", "T": T} for T in (32, 128)]
    rows = [run_apart(__file__, row) for row in wanted]
    table(rows, ["what", "loop", "backend", "T", "seconds", "trace_s", *STAGES])
    print(save("compile_time", METHOD, rows))


if __name__ == "__main__":
    main()
