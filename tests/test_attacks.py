"""Programs that once got a wrong answer, a wrong gradient or a crash: each still does what it does without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attacks.attack import Attack, Sequence, inputs, loop
from attacks.autograd import AUTOGRAD
from attacks.memory import MEMORY
from attacks.numbers import NUMBERS
from attacks.shapes import SEQUENCES, SHAPES
from compiled import Run, compile_and_run, run, worst
from qlacompile.errors import ArgumentError

BOUND = 2e-5


def buffers(fn: Any) -> tuple[torch.Tensor, ...]:
    return tuple(b.detach().clone() for b in fn.buffers()) if isinstance(fn, torch.nn.Module) else ()


def assert_same(got: Run, eager: Run, bound: float) -> None:
    assert [(x.dtype, x.shape) for x in got.outputs] == [(x.dtype, x.shape) for x in eager.outputs]
    # one number per tensor, so that a failure tells which
    errors = [worst((a,), (b,)) for a, b in zip(got.outputs, eager.outputs)]
    assert all(e <= bound for e in errors), f"outputs differ by {errors}"
    assert len(got.grads) == len(eager.grads)
    errors = [worst((a,), (b,)) for a, b in zip(got.grads, eager.grads)]
    bound = max(bound, BOUND)  # a gradient of a float32 input is a sum of float32 even where the outputs are float64
    assert all(e <= bound for e in errors), f"gradients differ by {errors}"
    for mine, theirs in zip(got.grads, eager.grads):
        assert theirs is not None or mine is None or not mine.any()
        assert mine is None or theirs is None or mine.dtype == theirs.dtype


@pytest.mark.parametrize("attack", [*NUMBERS, *MEMORY, *AUTOGRAD, *SHAPES], ids=lambda a: a.name)
def test_is_as_in_eager(attack: Attack) -> None:
    plain, rewritten = attack.build(), attack.build()
    torch.manual_seed(7)
    eager = run(plain, attack.make_args(), grad=attack.grad)
    torch.manual_seed(7)
    got = compile_and_run(rewritten, attack.make_args(), grad=attack.grad)
    assert_same(got, eager, attack.bound)
    for mine, theirs in zip(buffers(rewritten), buffers(plain)):
        torch.testing.assert_close(mine, theirs)
    if attack.layout:
        assert [x.is_contiguous() for x in got.outputs] == [x.is_contiguous() for x in eager.outputs]


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda s: s.name)
def test_later_calls_are_as_in_eager(sequence: Sequence) -> None:
    compiled = torch.compile(sequence.fn, backend="flashqla", fullgraph=True, options={"flashqla.rest": "eager"})

    def call(*args: Any) -> Any:
        for x in args:
            if sequence.dynamic_dim is not None:
                torch._dynamo.mark_dynamic(x, sequence.dynamic_dim)
        return compiled(*args)

    for args in sequence.calls:
        assert_same(run(call, args), run(sequence.fn, args), BOUND)


def test_second_derivative_is_right_or_refused() -> None:
    compiled = torch.compile(loop, backend="flashqla", fullgraph=True, options={"flashqla.rest": "eager"})

    def second(fn: Any) -> torch.Tensor:
        args = [x.requires_grad_() for x in inputs()]
        (first,) = torch.autograd.grad(fn(*args)[0].square().sum(), args[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), args[0])[0]

    try:
        got = second(compiled)
    except ArgumentError as error:
        assert "second derivative" in str(error)
    else:
        assert worst((got,), (second(loop),)) <= BOUND
