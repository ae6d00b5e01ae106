"""Every honest spelling is found, and gives the values and gradients of float64 autograd of its definition."""

from __future__ import annotations

import pytest
import torch

from compiled import compile_and_run, run, worst
from zoo import chunk_loops, installed, token_algebra, token_control, token_loops
from zoo.spelling import Spelling

SPELLINGS: tuple[Spelling, ...] = (
    *token_loops.SPELLINGS,
    *token_algebra.SPELLINGS,
    *token_control.SPELLINGS,
    *chunk_loops.SPELLINGS,
    *installed.SPELLINGS,
)
FP32_BOUND = 2e-5


def lengths(spelling: Spelling) -> list[int]:
    chunked = spelling in chunk_loops.SPELLINGS or "chunk" in spelling.name
    return [70, 200] if chunked else [24, 70]


CASES = [pytest.param(s, T, id=f"{s.name}-T{T}") for s in SPELLINGS for T in lengths(s)]


@pytest.mark.parametrize(("spelling", "T"), CASES)
def test_is_found_and_right(spelling: Spelling, T: int) -> None:
    args = spelling.make(seed=T, T=T)
    got = compile_and_run(spelling.fn, args, grad=spelling.grads)
    assert got.report is not None
    if spelling.must_match:
        assert len(got.report.matches) == spelling.regions, "\n".join(map(str, got.report.refusals))
    elif not got.report.matches:
        assert got.report.refusals
    eager = run(spelling.fn, args, grad=spelling.grads)

    def definition(*wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return spelling.reference(wide, detach=False)[: len(got.outputs)]

    exact = run(definition, tuple(a.double() for a in args), grad=spelling.grads)
    assert worst(got.outputs, exact.outputs) <= FP32_BOUND
    assert worst(got.grads, exact.grads) <= FP32_BOUND
    for mine, theirs in zip(got.outputs, eager.outputs):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
