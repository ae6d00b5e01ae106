"""The mathematics of the Hopper kernels, in PyTorch: exact without roundings, within the peers' error with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import recurrence
from qlacompile.kernels.gdn_sm90 import emulate

GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")

# Relative errors of FLA's kernels in bf16 (one H200, against float64, inputs as below); ours may be 1.1 times that.
PEER = {
    "o": 3.4e-3,
    "ht": 3.4e-3,
    "dq": 3.9e-3,
    "dk": 5.6e-3,
    "dv": 3.5e-3,
    "dg": 5.9e-3,
    "dbeta": 3.8e-3,
    "dh0": 2.3e-3,
}


def inputs(B: int, T: int, Hk: int, Hv: int, K: int, V: int, gate: str = "mild") -> dict[str, torch.Tensor]:
    q = F.normalize(torch.randn(B, T, Hk, K), dim=-1).bfloat16()
    k = F.normalize(torch.randn(B, T, Hk, K), dim=-1).bfloat16()
    g = F.logsigmoid(torch.randn(B, T, Hv)) / 16
    g[:, :, torch.arange(Hv) % 4 == 3] = 0  # some heads never forget
    if gate == "spread":  # decay rates from 0 to 16, as A_log gives them
        A = torch.linspace(0, 16, Hv)
        g = -A * F.softplus(0.5 * torch.randn(B, T, Hv) + 1)
    if gate == "-1e4":
        g[torch.rand(B, T, Hv) < 0.3] = -1e4
    if gate == "-inf":
        g[torch.rand(B, T, Hv) < 0.1] = -torch.inf
    return {
        "q": q,
        "k": k,
        "v": torch.randn(B, T, Hv, V).bfloat16(),
        "g": g,
        "beta": torch.rand(B, T, Hv).sigmoid(),
        "initial_state": torch.randn(B, Hv, K, V),
        "do": torch.randn(B, T, Hv, V).bfloat16(),
        "dht": torch.randn(B, Hv, K, V) / 8,
    }


def reference(x: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Token by token in float64, gradients by autograd."""
    leaves = [x[n].double().requires_grad_() for n in ("q", "k", "v", "g", "beta", "initial_state")]
    o, S = recurrence(*leaves, scale=scale)
    grads = torch.autograd.grad((o * x["do"].double()).sum() + (S * x["dht"].double()).sum(), leaves)
    return {"o": o.detach(), "ht": S.detach(), **dict(zip(GRADS, grads))}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("gate", ["mild", "spread", "-1e4", "-inf"])
@pytest.mark.parametrize(
    ("B", "T", "Hk", "Hv", "K", "V"),
    [(1, 1, 1, 1, 8, 8), (2, 70, 1, 2, 16, 8), (1, 130, 2, 4, 8, 16), (1, 64, 1, 3, 16, 16)],
    ids=str,
)
def test_exact_without_roundings(B: int, T: int, Hk: int, Hv: int, K: int, V: int, gate: str) -> None:
    x = inputs(B, T, Hk, Hv, K, V, gate)
    wanted = reference(x, K**-0.5)
    found = emulate.run(**x, scale=K**-0.5, dtype=None, compute=torch.float64)
    for name, want in wanted.items():
        assert (found[name].double() - want).norm() <= 1e-12 * want.norm().clamp_min(1e-3), name


@pytest.mark.parametrize(
    ("T", "Hk", "Hv", "K", "V"),
    [(320, 1, 4, 128, 128), (130, 2, 4, 64, 128), (70, 1, 2, 128, 64)],
    ids=str,
)
def test_roundings_cost_no_more_than_the_peers_do(T: int, Hk: int, Hv: int, K: int, V: int) -> None:
    x = inputs(1, T, Hk, Hv, K, V)
    wanted = reference(x, K**-0.5)
    found = emulate.run(**x, scale=K**-0.5, dtype=torch.bfloat16)
    for name, want in wanted.items():
        assert error(found[name], want) <= 1.1 * PEER[name], name


def test_dg_is_right_in_every_head_under_strong_decay() -> None:
    x = inputs(1, 260, 1, 4, 64, 64, "spread")
    wanted = reference(x, 0.125)["dg"]
    found = emulate.run(**x, scale=0.125, dtype=torch.bfloat16)["dg"]
    for head in range(4):
        assert error(found[..., head], wanted[..., head]) <= 1.5e-2, head


@pytest.mark.parametrize("gate", ["-1e4", "-inf"])
def test_strong_gates_stay_finite(gate: str) -> None:
    x = inputs(1, 130, 1, 2, 64, 64, gate)
    wanted = reference(x, 0.125)
    for name, value in emulate.run(**x, scale=0.125, dtype=torch.bfloat16).items():
        assert value.isfinite().all(), name
        assert error(value, wanted[name]) <= 1e-2, name
