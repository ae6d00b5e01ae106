"""One unmodified Qwen3-Next GatedDeltaNet layer, as it comes from transformers: speed and accuracy of ways to run it.

    python benchmarks/layer.py run OUT.json --mode MODE [--lengths 4096,16384] [--save DIR]
    python benchmarks/layer.py compare DIR OUT.json

``run`` times one mode in its own process (transformers binds fla when it is imported, so what is importable decides
which
kernels a mode uses: "fla" needs it, the others refuse it) and with ``--save`` keeps the output and every gradient.
``compare`` prints, for each tensor, the distance to the float64 run of the same weights and inputs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MODES = ("eager", "fla", "flashqla", "inductor", "float64")


def build(dtype: torch.dtype, device: str) -> tuple[torch.nn.Module, int]:
    """The layer with real sizes on a GPU, small ones on a CPU; the same weights in every mode, rounded to bfloat16."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    small = device == "cpu"
    hidden = 64 if small else 2048
    config = Qwen3NextConfig(
        hidden_size=hidden,
        linear_num_key_heads=2 if small else 16,
        linear_num_value_heads=4 if small else 32,
        linear_key_head_dim=16 if small else 128,
        linear_value_head_dim=16 if small else 128,
        num_hidden_layers=1,
    )
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(config, 0).to(torch.bfloat16).to(dtype).to(device)
    return layer, hidden


def median_ms(fn: Callable[[], Any], sync: Callable[[], None], budget: float) -> tuple[float, float]:
    """(median of repeats in ms, first call in s)"""
    start = time.perf_counter()
    fn()
    sync()
    first = time.perf_counter() - start
    fn()
    sync()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < budget and len(times) < 50):
        start = time.perf_counter()
        fn()
        sync()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), first


def run(args: argparse.Namespace) -> None:
    if args.mode == "fla":
        import fla  # noqa: F401
    elif importlib.util.find_spec("fla") is not None:
        sys.modules["fla"] = None  # type: ignore[assignment]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    dtype = torch.float64 if args.mode == "float64" else torch.bfloat16
    rows: list[dict[str, Any]] = []
    for length in (int(t) for t in args.lengths.split(",")):
        layer, hidden = build(dtype, device)
        torch._dynamo.reset()
        fn: Callable[..., Any] = layer
        matches: list[Any] = []
        if args.mode == "flashqla":
            from qlacompile.explain.collect import collecting

            fn = torch.compile(layer, backend="flashqla", fullgraph=True)
        elif args.mode == "inductor":
            fn = torch.compile(layer)
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(1, length, hidden, generator=generator).bfloat16().to(dtype).to(device)
        weight = torch.randn(1, length, hidden, generator=generator).bfloat16().to(dtype).to(device)
        leaf = x.clone().requires_grad_()

        def step(fn: Callable[..., Any] = fn, leaf: Any = leaf, layer: Any = layer, weight: Any = weight) -> Any:
            layer.zero_grad()
            leaf.grad = None
            out = fn(leaf)
            (out * weight).sum().backward()
            return out

        row: dict[str, Any] = {"mode": args.mode, "T": length}
        if args.mode == "flashqla":
            with collecting() as collector:
                out = step()
            report = collector.report()
            matches = list(report.matches)
            row["matches"] = [
                {"kernel": m.kernel, "absorbed": list(m.absorbed), "error": m.proof.error} for m in matches
            ]
            row["refusals"] = [str(r) for r in report.refusals]
            row["seconds"] = report.seconds
        else:
            out = step()
        sync()
        if args.save:
            kept = {"out": out.detach(), "dx": leaf.grad}
            kept.update({f"d{name}": p.grad for name, p in layer.named_parameters()})
            torch.save({k: v.detach().cpu() for k, v in kept.items()}, Path(args.save) / f"{args.mode}-{length}.pt")
        if args.mode != "float64":
            with torch.no_grad():
                row["forward_ms"], row["forward_first_s"] = median_ms(lambda: fn(x), sync, args.budget)  # noqa: B023
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            row["step_ms"], row["step_first_s"] = median_ms(step, sync, args.budget)
            if device == "cuda":
                row["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
        rows.append(row)
        print(json.dumps(row), flush=True)
        Path(args.out).write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1))
        del layer, leaf, out


def machine(device: str) -> dict[str, str]:
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d")}
    found["gpu" if device == "cuda" else "device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    for name in ("tilelang", "fla-core", "flash-qla", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compare(args: argparse.Namespace) -> None:
    """Distance of every saved tensor to float64; per head for the parameters of the gate."""
    rows = []
    for path in sorted(Path(args.dir).glob("float64-*.pt")):
        length = path.stem.split("-")[1]
        exact = torch.load(path)
        modes = {m: torch.load(p) for m in MODES[:-1] if (p := Path(args.dir) / f"{m}-{length}.pt").exists()}
        for name, reference in exact.items():
            row: dict[str, Any] = {"T": int(length), "tensor": name}
            for mode, tensors in modes.items():
                difference = tensors[name].double() - reference.double()
                row[mode] = float(difference.norm() / reference.double().norm())
                if name in ("dA_log", "ddt_bias"):
                    row[f"{mode}_head"] = float((difference.abs() / reference.double().abs()).median())
                    row[f"{mode}_head_max"] = float((difference.abs() / reference.double().abs()).max())
            rows.append(row)
            print(json.dumps(row), flush=True)
    Path(args.out).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("out")
    one.add_argument("--mode", choices=MODES, required=True)
    one.add_argument("--lengths", default="4096,16384")
    one.add_argument("--save")
    one.add_argument("--budget", type=float, default=1.0)
    one.set_defaults(call=run)
    two = commands.add_parser("compare")
    two.add_argument("dir")
    two.add_argument("out")
    two.set_defaults(call=compare)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
