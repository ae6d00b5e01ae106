"""Compile a function with our backend and see what was found, without paying for inductor where a test needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qlacompile.explain.collect import collecting
from qlacompile.explain.report import Report


@dataclass
class Run:
    """Outputs (flat), gradients of the differentiable arguments for a fixed random loss, and the report."""

    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]
    report: Report | None = None


def flat(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(t for v in value for t in flat(v))
    return ()


def clone(args: tuple[Any, ...], grad: bool) -> tuple[Any, ...]:
    def one(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        a = a.detach().clone()
        return a.requires_grad_(grad and a.is_floating_point())

    return tuple(map(one, args))


def run(fn: Callable[..., Any], args: tuple[Any, ...], grad: bool = True, params: tuple[Tensor, ...] = ()) -> Run:
    """Call ``fn``; with ``grad`` also take gradients of a random projection of all its outputs."""
    args = clone(args, grad)
    outputs = flat(fn(*args))
    grads: tuple[Tensor | None, ...] = ()
    if grad:
        gen = torch.Generator().manual_seed(99)
        loss = sum(
            (o * torch.randn(o.shape, generator=gen, dtype=torch.float64).to(o.dtype)).sum()
            for o in outputs
            if o.is_floating_point()
        )
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad] + list(params)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return Run(tuple(o.detach() for o in outputs), grads)


def compile_and_run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    grad: bool = True,
    params: tuple[Tensor, ...] = (),
    rest: str = "eager",
    fullgraph: bool = True,
    **options: Any,
) -> Run:
    torch._dynamo.reset()
    settings = {"flashqla.rest": rest, **{f"flashqla.{k}": v for k, v in options.items()}}
    compiled = torch.compile(fn, backend="flashqla", fullgraph=fullgraph, options=settings)
    with collecting() as collector:
        result = run(compiled, args, grad, params)
    result.report = collector.report()
    return result


def relative(a: Tensor, b: Tensor) -> float:
    """``||a - b|| / ||b||``, infinite for different shapes."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    size = b.norm()
    return float((a - b).norm() / size) if size > 0 else float((a - b).norm())


def worst(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> float:
    """The largest relative difference; a missing gradient counts as zero."""
    assert len(got) == len(expected)
    errors = [0.0]
    for a, b in zip(got, expected):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        errors.append(relative(a, b))  # type: ignore[arg-type]
    return max(errors)
