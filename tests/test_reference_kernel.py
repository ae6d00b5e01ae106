"""The portable kernel against the token recurrence in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inputs import NAMES, assert_as_good_as_tokens, assert_close, draw, run_op, run_oracle
from qlacompile.kernels.reference import KERNELS
from qlacompile.kernels.reference.layout import packed_layout

LENGTHS = [1, 2, 63, 64, 65, 70, 129, 300]
(KERNEL,) = KERNELS


def run(x):
    return run_op(x, "reference")


def check64(x, tolerance=1e-10):
    assert_close(run(x), run_oracle(x), tolerance)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths_float64(tokens):
    check64(draw(2, tokens, dtype=torch.float64))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lengths_low_precision(tokens, dtype):
    x = draw(2, tokens, 1, 2, 16, 8, dtype=dtype, eps=1e-6)
    assert_as_good_as_tokens(x, run(x))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6), (1, 8), (16, 32), (3, 3)])
def test_grouped_heads(heads):
    check64(draw(2, 70, *heads, 5, 7, dtype=torch.float64, eps=1e-6))


def test_value_heads_follow_their_key_head():
    """h // (Hv / Hk), as ``repeat_interleave``; ``repeat`` would be another function."""
    x = draw(1, 66, 2, 4, dtype=torch.float64)
    o = run(x)["o"]
    wide = replace(x, q=x.q.repeat_interleave(2, 2), k=x.k.repeat_interleave(2, 2))
    other = replace(x, q=x.q.repeat(1, 1, 2, 1), k=x.k.repeat(1, 1, 2, 1))
    torch.testing.assert_close(o, run(wide)["o"])
    assert (o - run(other)["o"]).norm() > 0.1 * o.norm()


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("initial_state",), ("g", "beta", "initial_state")], ids=str)
def test_absent_arguments(absent):
    check64(replace(draw(2, 70, dtype=torch.float64), **dict.fromkeys(absent)))


def test_no_tokens():
    x = draw(2, 0, dtype=torch.float64)
    found = run(x)
    assert found["o"].shape == x.v.shape
    assert torch.equal(found["final_state"], x.initial_state)
    assert torch.equal(found["dinitial_state"], x.dht)
    without = run(replace(x, initial_state=None))
    assert not without["final_state"].any()


@pytest.mark.parametrize("shape", [(0, 5, 2, 2, 8, 8), (2, 5, 2, 2, 8, 0), (2, 1, 2, 2, 8, 0), (0, 1, 2, 2, 8, 8)])
def test_nothing_to_compute(shape):
    x = draw(*shape)
    assert {name: value.shape for name, value in run(x).items() if name[0] == "d"} == {
        "d" + name: t.shape for name, t in zip(NAMES, x.tensors)
    }


PACKED = [
    [0, 15],
    [0, 0, 64, 64, 65, 200, 200],
    [0, 47, 128],
    [0, 25, 50, 100],
    [0, 1, 2, 3, 4, 5],
    [0, 15, 100, 130, 270, 271],
    [0, 0, 0],
]


@pytest.mark.parametrize("bounds", PACKED, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_equals_sequence_by_sequence(bounds, index):
    x = draw(1, bounds[-1] + 3, 1, 2, dtype=torch.float64, packed=bounds)
    check64(replace(x, cu_seqlens=x.cu_seqlens.to(index)))


def test_packed_float32():
    bounds = [0, 41, 84, 84, 113, 212, 251, 409]
    x = draw(1, 409, 2, 4, 16, 16, packed=bounds, gate="strong", eps=1e-6)
    assert_as_good_as_tokens(x, run(x))


def test_many_short_sequences_are_independent_of_their_neighbours():
    bounds = list(range(0, 16 * 50 + 1, 16))
    x = draw(1, 800, 2, 2, packed=bounds)
    whole = run(x)
    half = replace(
        x,
        **{n: getattr(x, n)[:, :400] for n in ("q", "k", "v", "g", "beta", "do")},
        initial_state=x.initial_state[:25],
        dht=x.dht[:25],
        cu_seqlens=x.cu_seqlens[:26],
    )
    for name, value in run(half).items():
        kept = whole[name][:25] if "state" in name else whole[name][:, :400]
        assert torch.equal(value, kept), name


def test_packed_layout_pads_only_last_chunks():
    layout = packed_layout(torch.tensor([0, 200, 210, 210, 338]), 400)
    assert layout.chunk == 56
    assert layout.counts == (3, 2, 2, 1)


@pytest.mark.parametrize("packed", [None, [0, 20, 20, 60]], ids=["batch", "packed"])
def test_reads_nothing_that_is_not_input(packed):
    """Rows that belong to no sequence, and memory that nobody has written yet, hold NaN."""
    x = draw(1, 75, 1, 2, packed=packed, eps=0.0)
    expected = run(x)
    if packed is not None:
        for tensor in (x.q, x.k, x.v, x.g, x.beta, x.do):
            tensor[:, packed[-1] :] = math.nan
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        found = run(x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
        if packed is not None and "state" not in name:
            assert not value[:, packed[-1] :].any(), name


def test_gradient_of_the_first_gate_is_zero_without_a_state():
    """Nothing is there to decay; and with a state the gradient must not be forced to zero."""
    ones = draw(1, 130, 2, 2, 16, 16, state=False)
    ones = replace(ones, do=torch.ones_like(ones.do), dht=torch.ones_like(ones.dht))
    assert not run(ones)["dg"][:, 0].any()
    given = replace(ones, initial_state=torch.randn(1, 2, 16, 16))
    assert run(given)["dg"][:, 0].all()
    assert_as_good_as_tokens(given, run(given))


@pytest.mark.parametrize("only", ["do", "dht"])
def test_loss_on_one_output_only(only):
    x = draw(1, 130, 2, 4, dtype=torch.float64)
    check64(replace(x, **{"dht" if only == "do" else "do": None}))


def test_strong_decay_head_by_head():
    x = draw(1, 300, 2, 8, 32, 32, gate="strong", beta=lambda s: torch.randn(s).sigmoid())
    assert_as_good_as_tokens(x, run(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [1e-3, 1e-12])
def test_decay_to_almost_nothing(decay, dtype):
    x = draw(1, 64, 2, 2, 64, 48, gate=math.log(decay), dtype=dtype)
    assert_as_good_as_tokens(x, run(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("worst", [-1e4, -3e38, -math.inf])
def test_resets(worst, dtype):
    """A gate that forgets everything, at starts, inside and at ends of chunks; the others stay accurate."""
    x = draw(1, 130, 1, 3, dtype=dtype)
    x.g[:, [0, 7, 8, 63, 64, 100, 129], 0] = worst
    x.g[:, :, 1] = worst
    found = run(x)
    assert_as_good_as_tokens(x, found)
    assert not found["dg"][:, :, 1].any()
    assert not found["dg"][:, [0, 7, 8, 63, 64, 100, 129], 0].any()


@pytest.mark.parametrize("tokens", [7, 50, 250])
def test_no_decay_is_the_plain_delta_rule(tokens):
    x = draw(1, tokens, 2, 2, gate=0.0, beta=lambda s: torch.rand(s).sigmoid())
    assert_as_good_as_tokens(x, run(x))
    assert torch.equal(run(x)["o"], run(replace(x, g=None))["o"])


def test_some_gates_are_zero():
    x = draw(1, 250, 2, 2)
    x = replace(x, g=x.g * (torch.rand_like(x.g) > 0.5))
    assert_as_good_as_tokens(x, run(x))


@pytest.mark.parametrize("gate", [0.0, "usual"])
@pytest.mark.parametrize("beta", ["two", "above one", "zero"])
def test_beta_between_zero_and_two(gate, beta):
    draws = {
        "two": lambda s: torch.full(s, 2.0),
        "above one": lambda s: 1 + torch.rand(s),
        "zero": lambda s: (torch.rand(s) > 0.3) * 2.0,
    }
    x = draw(1, 256, 1, 2, 64, 16, gate=gate, beta=draws[beta])
    assert_as_good_as_tokens(x, run(x))


def test_equal_keys_with_beta_two():
    """Powers of the matrix to be inverted grow like binomials here; substitution does not form them.

    The state grows and changes its sign with every token, so the rounding of all 64 tokens of a chunk adds up.
    """
    x = draw(1, 128, 1, 1, gate=0.0, beta=lambda s: torch.full(s, 2.0))
    x.k[:] = x.k[:, :1]
    assert_as_good_as_tokens(x, run(x), factor=4 * 64**0.5)


@pytest.mark.parametrize("parts", [(137, 63), (64, 136), (199, 1), (1, 199)], ids=str)
def test_continuing_from_the_state(parts):
    x = draw(1, 200, 1, 2)
    whole = run(x)
    state, outs = x.initial_state, []
    for start, stop in ((0, parts[0]), (parts[0], 200)):
        part = {n: getattr(x, n)[:, start:stop] for n in ("q", "k", "v", "g", "beta", "do")}
        found = run(replace(x, **part, initial_state=state))
        state = found["final_state"]
        outs.append(found["o"])
    torch.testing.assert_close(torch.cat(outs, 1), whole["o"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, whole["final_state"], rtol=1e-4, atol=1e-5)


def test_only_this_order_of_decay_error_write_read():
    """Neighbouring recurrences differ by far more than any tolerance used here."""
    x = draw(1, 128, 2, 2, 16, 16, dtype=torch.float64, state=False)
    o = run(x)["o"]
    unscaled = run(replace(x, scale=1.0))["o"]
    late = run(replace(x, g=torch.cat((x.g[:, 1:], x.g[:, :1]), 1)))["o"]
    for other in (unscaled, late):
        assert (o - other).norm() > 1e-2 * o.norm()


def test_batch_rows_are_independent():
    x = draw(3, 70, 1, 2)
    whole = run(x)
    for row in range(3):
        one = replace(x, **{n: t[row : row + 1] for n, t in vars(x).items() if torch.is_tensor(t)})
        for name, value in run(one).items():
            torch.testing.assert_close(value, whole[name][row : row + 1], rtol=0, atol=1e-6)


def test_same_result_every_time():
    x = draw(2, 130, 2, 4)
    first = run(x)
    for _ in range(3):
        assert all(torch.equal(value, first[name]) for name, value in run(x).items())


def test_inputs_are_not_written_to():
    for tokens, gate in ((1, "usual"), (1, None), (70, "usual")):
        x = draw(2, tokens, 1, 2, gate=gate)
        before = [None if t is None else t.clone() for t in x.tensors]
        run(x)
        assert all(t is None or torch.equal(t, b) for t, b in zip(x.tensors, before))


@pytest.mark.parametrize("tokens", [1, 70])
def test_any_strides(tokens):
    x = draw(2, tokens, 2, 4, dtype=torch.float64)
    expected = run(x)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in vars(x).items() if torch.is_tensor(t)}
    assert_close(run(replace(x, **turned)), expected, 1e-13)
    sliced = {n: torch.stack((t, t), -1)[..., 0] for n, t in vars(x).items() if torch.is_tensor(t)}
    assert_close(run(replace(x, **sliced)), expected, 1e-13)


def test_weak_decay_over_many_tokens():
    x = draw(1, 4096, 1, 1, 8, 8, gate=-1e-3, dtype=torch.bfloat16)
    o, state = KERNEL.forward(*x.tensors, None, x.scale, None, torch.bfloat16)
    single = replace(x.to(torch.float64))
    exact, exact_state = KERNEL.forward(*single.tensors, None, x.scale, None, torch.float64)
    assert (state - exact_state).norm() < 1e-5 * exact_state.norm()
    assert (o - exact).norm() < torch.finfo(torch.bfloat16).eps * exact.norm()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_matrix_products_keep_float32(precision, monkeypatch):
    """Nothing rounds to tf32 or bf16 inside, and the caller's setting is as before."""
    seen = set()
    bmm = torch.bmm

    def spy(*args, **kwargs):
        seen.add((torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision))
        return bmm(*args, **kwargs)

    monkeypatch.setattr(torch, "bmm", spy)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        x = draw(1, 70)
        assert_as_good_as_tokens(x, run(x))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {("ieee", "ieee")}


def test_mixed_dtypes():
    x = draw(2, 70, 1, 2, dtype=torch.bfloat16)
    x = replace(x, g=x.g.float(), beta=x.beta.float(), q=x.q.half())
    found = run(x)
    assert [found["d" + n].dtype for n in NAMES] == [t.dtype for t in x.tensors]
    assert_as_good_as_tokens(x, found)


def test_one_scan_step_for_each_chunk(monkeypatch):
    """The number of operations grows with chunks, not with tokens."""
    calls = []
    baddbmm = torch.Tensor.baddbmm_
    monkeypatch.setattr(torch.Tensor, "baddbmm_", lambda *a, **k: (calls.append(1), baddbmm(*a, **k))[1])
    x = draw(1, 640, 1, 1)
    KERNEL.forward(*x.tensors, None, x.scale, None, torch.float32)
    assert len(calls) == 10
