"""Random inputs of the gated delta rule, and error budgets that are measured instead of chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import oracle

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator in the order of its schema, and gradients of its outputs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    scale: float
    eps: float | None
    do: torch.Tensor | None
    dht: torch.Tensor | None

    @property
    def tensors(self):
        return [getattr(self, name) for name in NAMES]

    @property
    def state_dtype(self):
        return torch.float64 if any(x is not None and x.dtype is torch.float64 for x in self.tensors) else torch.float32

    def to(self, dtype):
        """The same values, computed with in ``dtype``."""
        moved = {name: x.to(dtype) for name, x in vars(self).items() if torch.is_tensor(x) and x.is_floating_point()}
        return replace(self, **moved)


def draw(
    batch=1, tokens=8, key_heads=2, heads=2, key_dim=8, value_dim=12, *,
    dtype=torch.float32, gate="usual", beta=None, state=True, packed=None, eps=None, scale=None, device="cpu",
):  # fmt: skip
    """Inputs from torch's global generator, which the test session seeds and prints.

    ``gate``: "usual", "strong" (decay rates from 0 to 16 over the heads), a number, or ``None``; ``beta`` a function of
    the shape. Keys have norm 1 unless the operator is asked to normalise them.
    """
    like = {"device": device, "dtype": torch.float32}
    sequences = batch if packed is None else len(packed) - 1
    q = torch.randn(batch, tokens, key_heads, key_dim, **like)
    k = torch.randn(batch, tokens, key_heads, key_dim, **like)
    k = k if eps is not None else F.normalize(k, dim=-1)
    v = torch.randn(batch, tokens, heads, value_dim, **like)
    shape = (batch, tokens, heads)
    if gate == "usual":
        g = F.logsigmoid(2 * torch.randn(shape, **like) + 1)
    elif gate == "strong":
        rate = torch.rand(heads, **like) * 16
        rate[0], rate[-1] = 0, 16
        g = -rate * F.softplus(0.5 * torch.randn(shape, **like) + 1)
    else:
        g = None if gate is None else torch.full(shape, float(gate), **like)
    b = torch.rand(shape, **like) if beta is None else beta(shape)
    h = torch.randn(sequences, heads, key_dim, value_dim, **like) if state else None
    cu = None if packed is None else torch.tensor(packed, device=device)
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    do = torch.randn(batch, tokens, heads, value_dim, **like)
    dht = torch.randn(sequences, heads, key_dim, value_dim, **like)
    q, k, v, g, b, do = (None if x is None else x.to(dtype) for x in (q, k, v, g, b, do))
    h = None if h is None else h.to(state_dtype)
    return Inputs(q, k, v, g, b, h, cu, key_dim**-0.5 if scale is None else scale, eps, do, dht.to(state_dtype))


def run_oracle(x: Inputs, dtype=torch.float64):
    """``{name: tensor}`` of both outputs and all gradients by the token recurrence in ``dtype``."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in x.tensors]
    out = oracle.gated_delta_rule(*leaves, x.cu_seqlens, x.scale, x.eps, dtype)
    return _with_gradients(x, leaves, out)


def run_op(x: Inputs, kernel="auto"):
    """The same of the operator, each in the dtype that the operator gives it."""
    from qlacompile.ops import gated_delta_rule

    leaves = [None if t is None else t.detach().requires_grad_() for t in x.tensors]
    out = gated_delta_rule(*leaves, x.cu_seqlens, x.scale, x.eps, None, kernel, True)
    return _with_gradients(x, leaves, out)


def _with_gradients(x, leaves, out):
    used = [(o, d.to(o.dtype)) for o, d in zip(out, (x.do, x.dht)) if d is not None and o.requires_grad]
    wanted = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad([o for o, _ in used], wanted, [d for _, d in used], allow_unused=True))
    found = {"o": out[0].detach(), "final_state": out[1].detach()}
    for name, leaf in zip(NAMES, leaves):
        if leaf is not None:
            grad = next(grads)
            found["d" + name] = torch.zeros_like(leaf) if grad is None else grad.detach()
    return found


def assert_as_good_as_tokens(x: Inputs, found: dict, factor=4.0):
    """No error against float64 is larger than ``factor`` times that of the token loop in float32 plus one rounding.

    Everything with a head dimension is compared head by head: one head with large gradients must not hide another. The
    gradient of the gate gets twice the factor: where nothing decays it sums over thousands of pairs of tokens, which
    the token loop adds up in another order.
    """
    exact, low = run_oracle(x), run_oracle(x, x.state_dtype)
    for name, value in found.items():
        assert torch.isfinite(value).all(), f"{name} is not finite"
        heads = 1 if name in ("final_state", "dinitial_state") else 2
        roundoff = torch.finfo(value.dtype).eps
        error = _norms(value - exact[name], heads)
        budget = _norms(low[name].to(value.dtype) - exact[name], heads) + roundoff * _norms(exact[name], heads)
        budget *= 2 * factor if name == "dg" else factor
        worst = (error - budget).argmax()
        assert (error <= budget).all(), f"{name}, head {worst}: error {error[worst]:.2e}, budget {budget[worst]:.2e}"


def _norms(x, dim):
    return x.double().movedim(dim, 0).flatten(1).norm(dim=1)


def assert_close(found: dict, expected: dict, tolerance=1e-10):
    """Relative L2 errors of all results, ``float64`` against ``float64``."""
    for name, value in found.items():
        scale = expected[name].double().norm().clamp_min(1e-12)
        error = ((value.double() - expected[name].double()).norm() / scale).item()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
