"""The operator: its contract with torch, its arguments, and the functions around it."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from inputs import NAMES, assert_close, draw, run_op, run_oracle
from qlacompile import lower, ops
from qlacompile.errors import ArgumentError, KernelError
from qlacompile.ops import run as ops_run


def call(x, out_dtype=None, kernel="auto", strict=False):
    return ops.gated_delta_rule(*x.tensors, x.cu_seqlens, x.scale, x.eps, out_dtype, kernel, strict)


def with_grad(x, mask=(True,) * 6):
    tensors = {n: t.detach().requires_grad_(m) for n, t, m in zip(NAMES, x.tensors, mask) if t is not None}
    return replace(x, **tensors)


# --- the contract with torch -----------------------------------------------------------------------------------------


VARIANTS = {
    "all": {},
    "normalised": {"eps": 1e-6},
    "grouped": {"key_heads": 1},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "one token": {"tokens": 1},
    "packed": {"batch": 1, "packed": [0, 2, 2, 5]},
    "no state": {"state": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_opcheck(variant, grad):
    x = draw(**{"batch": 2, "tokens": 6, **VARIANTS[variant]})
    x = with_grad(x) if grad else x
    torch.library.opcheck(ops.gated_delta_rule, (*x.tensors, x.cu_seqlens, x.scale, x.eps, None, "auto", False))


def test_opcheck_with_only_some_arguments():
    x = with_grad(draw(2, 6, state=False), (True, False, True, False, True, False))
    args = (x.q, x.k, x.v, None, x.beta, None, None, 0.5, None, torch.float32, "reference", True)
    torch.library.opcheck(ops.gated_delta_rule, args)
    torch.library.opcheck(ops.gated_delta_rule, (x.q, x.k, x.v, None, None, None, None, 0.5, None, None, "auto", False))


@pytest.mark.parametrize("grads", ["both", "do", "dht"])
def test_opcheck_backward(grads):
    x = draw(2, 6)
    args = (*x.tensors, None, x.do if grads != "dht" else None, x.dht if grads != "do" else None, 0.5, 1e-6)
    torch.library.opcheck(ops.gated_delta_rule_backward, (*args, "auto", False, [True, False, True, True, False, True]))


@pytest.mark.parametrize("packed", [None, [0, 3, 3, 5]], ids=["batch", "packed"])
def test_gradcheck(packed):
    x = with_grad(draw(1, 5, 1, 2, 3, 4, dtype=torch.float64, packed=packed, eps=1e-6))
    assert torch.autograd.gradcheck(lambda *t: call(replace(x, **dict(zip(NAMES, t)))), x.tensors)


def test_every_combination_of_wanted_gradients():
    x = draw(2, 5, 1, 2, 3, 4, dtype=torch.float64, eps=1e-6)
    full = run_oracle(x)
    for mask in itertools.product((False, True), repeat=6):
        if not any(mask):
            continue
        leaves = with_grad(x, mask)
        wanted = [(n, t) for n, t in zip(NAMES, leaves.tensors) if t.requires_grad]
        for use in ((True, True), (True, False), (False, True)):
            out = [(o, d) for o, d, u in zip(call(leaves), (x.do, x.dht), use) if u]
            if not any(o.requires_grad for o, _ in out):
                continue
            grads = torch.autograd.grad(
                [o for o, _ in out], [t for _, t in wanted], [d for _, d in out], allow_unused=True
            )
            if all(use):
                assert_close({"d" + n: g for (n, _), g in zip(wanted, grads)}, full)
            assert all(t.grad is None for t in leaves.tensors)


def test_gradients_that_are_not_needed_are_empty():
    x = draw(2, 5)
    needs = [True, False, True, False, False, False]
    grads = ops.gated_delta_rule_backward(*x.tensors, None, x.do, x.dht, 0.5, None, "auto", False, needs)
    assert [g.numel() > 0 for g in grads] == needs


def test_incoming_gradients_of_any_strides():
    """From sums (stride 0), transposes and slices of the output."""
    x = draw(2, 70, 1, 2, dtype=torch.float64)
    weight = torch.randn(2, 2, 70, 12, dtype=torch.float64)
    losses = {
        "sum": (lambda o: o.sum(), torch.ones_like(x.do)),
        "transposed": (lambda o: (o.transpose(1, 2) * weight).sum(), weight.transpose(1, 2)),
        "sliced": (lambda o: o[..., ::2].sum(), torch.ones_like(x.do) * torch.tensor([1.0, 0.0] * 6)),
    }
    for loss, do in losses.values():
        leaves = with_grad(x)
        grads = torch.autograd.grad(loss(call(leaves)[0]), leaves.tensors)
        expected = run_oracle(replace(x, do=do.double(), dht=None))
        assert_close({"d" + n: g for n, g in zip(NAMES, grads)}, {n: expected[n] for n in expected})


def test_gradients_are_contiguous_in_the_dtype_of_their_input():
    x = with_grad(replace(draw(2, 70, 1, 2, dtype=torch.bfloat16), initial_state=torch.randn(2, 2, 8, 12).bfloat16()))
    turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x.tensors]
    o, final = ops.gated_delta_rule(*turned, None, 0.5, None, torch.float32, "auto", False)
    assert (o.dtype, final.dtype) == (torch.float32, torch.float32)
    assert o.is_contiguous() and final.is_contiguous()
    grads = ops.gated_delta_rule_backward(*turned, None, x.do, x.dht, 0.5, None, "auto", False, [True] * 6)
    for grad, t in zip(grads, turned):
        assert grad.dtype == t.dtype and grad.shape == t.shape and grad.is_contiguous()


def test_no_second_derivative():
    x = with_grad(draw(1, 5))
    (dq,) = torch.autograd.grad(call(x)[0].sum(), x.q, create_graph=True)
    with pytest.raises(ArgumentError, match=r"QLA405.*second derivative"):
        torch.autograd.grad(dq.sum(), x.k)


@pytest.mark.parametrize("tokens", [1, 70])
def test_autocast_does_not_reach_inside(tokens):
    x = draw(2, tokens)
    expected = run_op(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run_op(x)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_vmap_is_a_batch():
    x = draw(2, 9)
    many = [torch.stack((t, t * 0.5)) for t in x.tensors]
    whole = torch.func.vmap(lambda *t: call(replace(x, **dict(zip(NAMES, t)))))(*many)
    only_q = torch.func.vmap(lambda q: call(replace(x, q=q)), in_dims=1)(many[0].movedim(0, 1))
    half = replace(x, **{n: t[1] for n, t in zip(NAMES, many)})
    for found, other in ((whole, half), (only_q, replace(x, q=x.q * 0.5))):
        for a, b in zip(found, call(other)):
            torch.testing.assert_close(a[1], b)
    packed = draw(1, 9, packed=[0, 9])
    with pytest.raises(ArgumentError, match=r"QLA404.*torch.vmap"):
        torch.func.vmap(lambda q: call(replace(packed, q=q)))(torch.stack((packed.q, packed.q)))


def test_torch_func_grad_is_refused_not_zero():
    x = draw(1, 5)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda q: call(replace(x, q=q))[0].sum())(x.q)


def layer(q, k, v, g, beta, h, cu=None):
    """A caller with something before and after the operator."""
    o, state = ops.chunk_gated_delta_rule(
        torch.nn.functional.silu(q), k, v + 1, -torch.nn.functional.softplus(g), beta.sigmoid(),
        initial_state=h, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
    )  # fmt: skip
    return o.transpose(1, 2) * 2, state


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(backend, dynamic):
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    sizes = [(3, 5), (5, 70), (7, 129)] if dynamic else [(3, 70)]
    for batch, tokens in sizes:
        x = with_grad(draw(batch, tokens, 1, 2, 16, 24))
        expected, found = layer(*x.tensors), compiled(*x.tensors)
        grads = [torch.autograd.grad(o.square().sum() + s.sum(), x.tensors) for o, s in (expected, found)]
        for a, b in zip((*expected, *grads[0]), (*found, *grads[1])):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiles_packed():
    x = draw(1, 20, packed=[0, 7, 7, 18])
    torch.testing.assert_close(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*x.tensors, x.cu_seqlens),
        layer(*x.tensors, x.cu_seqlens),
    )


# --- arguments -------------------------------------------------------------------------------------------------------


def bad(**changes):
    return replace(draw(2, 6, 2, 4), **changes)


REFUSED = {
    "rank": ("QLA401", lambda: bad(q=torch.randn(2, 6, 8))),
    "rank of g": ("QLA401", lambda: bad(g=torch.randn(2, 6, 4, 1))),
    "width of q": ("QLA401", lambda: bad(q=torch.randn(2, 6, 2, 9))),
    "heads of q": ("QLA401", lambda: bad(q=torch.randn(2, 6, 1, 8))),
    "tokens of k": ("QLA401", lambda: bad(k=torch.randn(2, 7, 2, 8), q=torch.randn(2, 7, 2, 8))),
    "group": ("QLA401", lambda: draw(2, 6, 2, 3)),
    "heads of beta": ("QLA401", lambda: bad(beta=torch.rand(2, 6, 2))),
    "state of one sequence": ("QLA401", lambda: bad(initial_state=torch.randn(1, 4, 8, 12))),
    "state with values first": ("QLA401", lambda: bad(initial_state=torch.randn(2, 4, 12, 8))),
    "integer": ("QLA402", lambda: bad(v=torch.ones(2, 6, 4, 12, dtype=torch.int64))),
    "complex": ("QLA402", lambda: bad(g=torch.ones(2, 6, 4, dtype=torch.complex64))),
    "device": ("QLA403", lambda: bad(g=torch.ones(2, 6, 4, device="meta"))),
    "packed batch": ("QLA404", lambda: bad(cu_seqlens=torch.tensor([0, 6]), initial_state=None)),
    "packed dtype": ("QLA404", lambda: replace(draw(1, 6), cu_seqlens=torch.tensor([0.0, 6.0]))),
    "packed rank": ("QLA404", lambda: replace(draw(1, 6), cu_seqlens=torch.tensor([[0, 6]]))),
    "packed empty": ("QLA404", lambda: replace(draw(1, 6), cu_seqlens=torch.tensor([], dtype=torch.int64))),
    "packed start": ("QLA404", lambda: draw(1, 6, packed=[1, 6])),
    "packed falling": ("QLA404", lambda: draw(1, 6, packed=[0, 4, 3, 6])),
    "packed too long": ("QLA404", lambda: draw(1, 6, packed=[0, 4, 7])),
    "packed states": ("QLA401", lambda: replace(draw(1, 6, packed=[0, 2, 6]), initial_state=torch.randn(1, 2, 8, 12))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments(case):
    code, make = REFUSED[case]
    x = make()
    with pytest.raises(ArgumentError, match=r"^QLA40\d: .+found .+expected") as error:
        call(x)
    assert error.value.code == code


def test_unknown_kernel():
    with pytest.raises(ArgumentError, match=r"QLA405: kernel: found 'fast', expected one of .*reference") as error:
        call(draw(), kernel="fast")
    assert error.value.code == "QLA405"


KEYWORDS = {
    "head_first": ({"head_first": True}, "transpose"),
    "transpose_state_layout": ({"transpose_state_layout": True}, "state_v_first"),
    "cp_context": ({"cp_context": object()}, "context parallelism"),
    "nonsense": ({"nonsense": 1}, "leave it out"),
    "chunk_size": ({"chunk_size": 48}, "16, 32 or 64"),
    "allow_neg_eigval": ({"allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel"),
    "use_gate_in_kernel": ({"use_gate_in_kernel": True}, "A_log"),
    "A_log": ({"A_log": torch.ones(2)}, "use_gate_in_kernel"),
    "cu_seqlens": ({"cu_seqlens_cpu": torch.tensor([0, 8])}, "expected the boundaries"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_refused_keywords(name):
    x = draw()
    keywords, advice = KEYWORDS[name]
    with pytest.raises(ArgumentError, match=f"{name}.*found.*{advice}"):
        ops.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **keywords)


def test_channel_decay_is_another_family():
    x = draw()
    with pytest.raises(ArgumentError, match="gk: found a decay per channel"):
        ops.recurrent_gated_delta_rule(x.q, x.k, x.v, gk=torch.zeros_like(x.k))


# --- the functions ---------------------------------------------------------------------------------------------------


def test_defaults():
    x = draw(2, 9, state=False)
    o, state = ops.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
    assert state is None
    torch.testing.assert_close(o, call(x)[0], rtol=0, atol=0)


def test_recurrent_is_the_same_function():
    x = draw(2, 1)
    keywords = {"initial_state": x.initial_state, "output_final_state": True}
    chunk = ops.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **keywords)
    torch.testing.assert_close(ops.recurrent_gated_delta_rule(x.q, x.k, x.v, x.g, beta=x.beta, **keywords), chunk)
    o, state = ops.recurrent_gated_delta_rule(x.q, x.k, x.v)
    torch.testing.assert_close(o, call(replace(x, g=None, beta=None, initial_state=None))[0])
    assert state is None


def test_state_with_values_first():
    x = draw(2, 9)
    _, state = ops.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, None, x.initial_state, True)
    turned = x.initial_state.transpose(-1, -2)
    _, other = ops.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, None, turned, True, state_v_first=True)
    assert other.is_contiguous() and torch.equal(other.transpose(-1, -2), state)


def test_gate_and_beta_from_raw_inputs():
    """Computed in float32 from bfloat16: a decay near 1 is not rounded to 1."""
    x = draw(2, 9, dtype=torch.bfloat16)
    a_log, bias = torch.randn(2), torch.randn(2)
    o, _ = ops.chunk_gated_delta_rule(
        x.q, x.k, x.v, x.g, x.beta, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    g = -a_log.exp() * torch.nn.functional.softplus(x.g.float() + bias)
    y = replace(x, g=g, beta=2 * x.beta.float().sigmoid(), initial_state=None, eps=1e-6)
    torch.testing.assert_close(o, call(y)[0], rtol=0, atol=0)


def test_hints_of_other_implementations_change_nothing():
    x = draw(1, 9, packed=[0, 4, 9])
    args = (x.q, x.k, x.v, x.g, x.beta)
    plain, _ = ops.chunk_gated_delta_rule(*args, cu_seqlens=x.cu_seqlens)
    hinted, _ = ops.chunk_gated_delta_rule(
        *args, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens, chunk_indices=torch.tensor([[0, 0]]), chunk_size=32
    )
    assert torch.equal(plain, hinted)


# --- kernels that fail -----------------------------------------------------------------------------------------------


class Failing:
    """A kernel that claims to run everything and does not."""

    name, family, version, priority = "failing", "gated_delta_rule", 1, 99

    def __init__(self, error=None, refusal=None):
        self.error, self.refusal, self.calls = error, refusal, 0

    def supports(self, spec):
        return self.refusal

    def forward(self, *args):
        self.calls += 1
        raise self.error

    backward = forward


@pytest.fixture
def install(monkeypatch):
    """Make a kernel known beside the real ones."""

    def add(kernel):
        found, broken = lower.discover()
        known = {**found, (kernel.family, kernel.name): kernel}
        monkeypatch.setattr(lower, "discover", lambda: (known, broken))
        lower.choose.cache_clear()
        ops_run.reset()
        return kernel

    yield add
    lower.choose.cache_clear()
    ops_run.reset()


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (Failing(KernelError("QLA506", "nvcc is missing")), "QLA506"),
        (Failing(RuntimeError("invalid argument")), "QLA507"),
        (Failing(refusal=("QLA503", "only head size 128")), "QLA503"),
    ],
    ids=["build", "launch", "refuses"],
)
def test_portable_kernel_takes_over(kernel, code, install):
    install(kernel)
    x = with_grad(draw(2, 6))
    with pytest.warns(RuntimeWarning, match=code) as caught:
        found = call(x, kernel="failing")
        torch.autograd.grad(found[0].sum(), x.q)
        call(x, kernel="failing")
    assert len(caught) == 1 if kernel.refusal else len(caught) <= 2
    torch.testing.assert_close(found[0], call(x, kernel="reference")[0])
    assert kernel.calls <= 2  # forward and backward once each: a failure is remembered
    with pytest.raises(KernelError, match=code) as error:
        call(x, kernel="failing", strict=True)
    assert error.value.code == code


def test_auto_takes_the_best_kernel_and_skips_what_refuses(install):
    kernel = install(Failing(RuntimeError("broken")))
    with pytest.warns(RuntimeWarning, match="QLA507"):
        call(draw(2, 6))
    assert kernel.calls == 1
    install(Failing(refusal=("QLA501", "needs a GPU")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(draw(2, 6), strict=True)


def test_errors_that_no_other_kernel_can_help(install):
    install(Failing(torch.cuda.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        call(draw(2, 6))
