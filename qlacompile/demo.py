"""``demo``: an unmodified transformers layer and a plain token loop, run eagerly, by inductor, and by flashqla.

For each: how many regions were matched, how far output and gradients are from float64, seconds of the first call, and
milliseconds of the later ones. It fails if a region was not matched or an error is beyond its bound.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .commands.console import Console, UsageError
from .explain.collect import collecting

# A tensor's error may be this large, or TIMES that of eager code in the same dtype: gradients of gates are sums that
# almost cancel. In bfloat16 the recurrence runs on tensor cores with float32 accumulation, as in every
# kernel for it, where eager code works in float32 throughout.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
TIMES = 10
BUDGET = 2.0  # seconds of repeated runs for one time


@dataclass
class Problem:
    """A function, its inputs, and the tensors by name whose gradients are compared."""

    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    leaves: dict[str, Tensor]
    weight: Tensor | None = None

    def double(self) -> Problem:
        """The same in float64."""
        inputs = tuple(x.detach().double().requires_grad_() for x in self.inputs)
        if isinstance(self.fn, nn.Module):
            fn: Any = copy.deepcopy(self.fn).double()
            return Problem(fn, inputs, {**dict(fn.named_parameters()), "input": inputs[0]})
        return Problem(_exact_loop, inputs, dict(zip(self.leaves, inputs)))

    def step(self, fn: Callable[..., Tensor]) -> Tensor:
        """One training step without the optimiser; gradients are left in the leaves.

        The loss is a fixed random functional: a square would be nearly constant behind the layer's norm, and its
        gradients nothing but rounding.
        """
        for leaf in self.leaves.values():
            leaf.grad = None
        out = fn(*self.inputs)
        if self.weight is None:
            gen = torch.Generator().manual_seed(1)
            self.weight = torch.randn(out.shape, generator=gen, dtype=torch.float64).to(out)
        (out * self.weight).sum().backward()
        return out


def token_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet as one would write it first. q, k [B,T,H,K]; v [B,T,H,V]; g (log decay), beta [B,T,H]."""
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = v[:, t] - (S * k[:, t, :, :, None]).sum(-2)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1)


def _exact_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same for the comparison in float64; unbound once, since the gradient of ``q[:, t]`` is as long as q."""
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for q_t, k_t, v_t, g_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta))):
        S = S * g_t.exp()[..., None, None]
        error = v_t - (S * k_t[..., None]).sum(-2)
        S = S + k_t[..., None] * (b_t[..., None] * error)[..., None, :]
        outs.append((S * q_t[..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1)


def loop_problem(T: int, device: torch.device) -> Problem:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 4, 32, generator=gen) for _ in range(3))
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    g = -torch.rand(1, T, 4, generator=gen)
    beta = torch.rand(1, T, 4, generator=gen)
    inputs = tuple(x.to(device).requires_grad_() for x in (q, k, v, g, beta))
    return Problem(token_loop, inputs, dict(zip(("q", "k", "v", "g", "beta"), inputs)))


def layer_problem(T: int, device: torch.device) -> Problem:
    # transformers decides on import whether its layers call fla's kernels; those would hide the eager code
    before = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
    except ImportError as error:
        raise UsageError("the layer is from transformers: pip install 'qlacompile[demo]', or --only loop") from error
    finally:
        del sys.modules["fla"]
        if before is not None:
            sys.modules["fla"] = before
    large = device.type == "cuda"
    sizes = (2048, 16, 32, 128) if large else (128, 2, 4, 32)
    hidden, k_heads, v_heads, dim = sizes
    config = Qwen3NextConfig(
        hidden_size=hidden,
        linear_num_key_heads=k_heads,
        linear_num_value_heads=v_heads,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(config, 0).to(device, torch.bfloat16 if large else torch.float32)
    x = torch.randn(1, T, hidden).to(device, next(layer.parameters()).dtype).requires_grad_()
    return Problem(layer, (x,), {**dict(layer.named_parameters()), "input": x})


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    make: Callable[[int, torch.device], Problem]
    length: int
    inductor_length: int  # inductor unrolls the loop: its compile time grows with the length
    eager_step_length: int  # the eager loop's backward takes time that grows with the square of the length

    def lengths(self, backend: str) -> tuple[int, int]:
        """Tokens of the forward, and of the training step."""
        if backend == "inductor":
            return self.inductor_length, self.inductor_length
        return self.length, self.eager_step_length if backend == "eager" else self.length


def parts(device: torch.device) -> tuple[Part, ...]:
    loop = Part("loop", "token loop, 4 heads of 32, fp32", loop_problem, 4096, 16, 1024)
    if device.type == "cuda":
        title = "Qwen3-Next layer, 16/32 heads of 128, hidden 2048, bf16"
        return Part("layer", title, layer_problem, 4096, 512, 4096), loop
    return Part("layer", "Qwen3-Next layer, 2/4 heads of 32, hidden 128, fp32", layer_problem, 1024, 128, 1024), loop


@dataclass
class Row:
    part: str
    backend: str
    T: int
    step_length: int
    regions: int | None
    errors: dict[str, float]  # "output", and each gradient by the name of its tensor
    first_forward_s: float
    forward_ms: float
    first_step_s: float
    step_ms: float
    ok: bool = True

    def worst_gradient(self) -> str:
        return max((name for name in self.errors if name != "output"), key=lambda name: self.errors[name])


def measure(part: Part, backend: str, device: torch.device, console: Console, eager: dict[str, float]) -> Row:
    """One line of the table: compile, time, and compare with float64. ``eager``: the errors of eager code."""
    T, step_length = part.lengths(backend)
    torch.compiler.reset()
    problem = part.make(T, device)
    fn = problem.fn if backend == "eager" else torch.compile(problem.fn, backend=backend)
    label = f"{part.name}, {backend}"
    with torch.no_grad():
        with collecting() as found, console.progress(f"{label}, T={T}, first forward"):
            first_forward = _seconds(lambda: fn(*problem.inputs), device)
        forward = _median_ms(lambda: fn(*problem.inputs), device)
    if step_length != T:
        problem = part.make(step_length, device)
    with console.progress(f"{label}, T={step_length}, first training step"):
        first_step = _seconds(lambda: problem.step(fn), device)
    step = _median_ms(lambda: problem.step(fn), device)
    with console.progress(f"{label}, comparison with float64"):
        out, exact = problem.step(fn), problem.double()
        truth = exact.step(exact.fn)
    errors = {name: _relative(leaf.grad, exact.leaves[name].grad) for name, leaf in problem.leaves.items()}
    row = Row(
        part=part.name,
        backend=backend,
        T=T,
        step_length=step_length,
        regions=len(found.matches) if backend == "flashqla" else None,
        errors={"output": _relative(out, truth), **errors},
        first_forward_s=first_forward,
        forward_ms=forward,
        first_step_s=first_step,
        step_ms=step,
    )
    floor = BOUND[problem.inputs[0].dtype]
    within = all(error <= max(floor, TIMES * eager.get(name, 0.0)) for name, error in row.errors.items())
    row.ok = within and row.regions in (None, 1)
    if backend == "flashqla" and row.regions != 1:
        for refusal in found.refusals:
            console.error(str(refusal))
    return row


def _relative(value: Tensor | None, truth: Tensor | None) -> float:
    assert value is not None and truth is not None
    difference = (value.detach().double() - truth.detach().double()).norm() / truth.detach().double().norm()
    return float(difference) if difference.isfinite() else float("inf")


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _median_ms(run: Callable[[], Any], device: torch.device) -> float:
    times = [_seconds(run, device)]
    while sum(times) < BUDGET and len(times) < 30:
        times.append(_seconds(run, device))
    return 1e3 * statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # else a second demo would find everything compiled
        return compare(args, Console(args.json))


def compare(args: argparse.Namespace, console: Console) -> int:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    start = time.perf_counter()
    for part in parts(device):
        if args.only not in (None, part.name):
            continue
        console.say(f"{part.title}, on {device.type}, {args.threads} CPU thread(s)")
        mine: list[Row] = []
        for backend in ("eager", "inductor", "flashqla"):
            mine.append(measure(part, backend, device, console, mine[0].errors if mine else {}))
        _table(console, mine)
        rows += mine
    ok = all(row.ok for row in rows if row.backend == "flashqla")
    console.say(
        "Errors are relative, against float64. Inductor unrolls loops and compiles for long, hence its shorter T."
    )
    console.say(console.paint("every region matched, every error within its bound", "good") if ok else "")
    if not ok:
        bad = ", ".join(row.part for row in rows if row.backend == "flashqla" and not row.ok)
        console.error(f"a region was not matched, or an error is beyond its bound: {bad}")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "device": device.type}
    seconds = time.perf_counter() - start
    console.document({"ok": ok, "seconds": seconds, "versions": versions, "rows": [asdict(row) for row in rows]})
    return 0 if ok else 1


def _table(console: Console, rows: list[Row]) -> None:
    header = ["backend", "regions", "output error", "gradient error (worst)", "T", "first forward", "forward"]
    cells = [
        [
            row.backend,
            "-" if row.regions is None else str(row.regions),
            f"{row.errors['output']:.1e}",
            f"{row.errors[row.worst_gradient()]:.1e} ({row.worst_gradient()})",
            str(row.T),
            f"{row.first_forward_s:.1f} s",
            f"{row.forward_ms:.2f} ms",
            str(row.step_length),
            f"{row.first_step_s:.1f} s",
            f"{row.step_ms:.2f} ms",
        ]
        for row in rows
    ]
    console.table([*header, "T", "first step", "step"], cells)
    console.say()
