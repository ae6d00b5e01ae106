"""Small models with Gated DeltaNet layers of the installed transformers, unmodified, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.eager_transformers import MODULES

HIDDEN = 32


@dataclass(frozen=True)
class Model:
    """``build()`` gives a module with ``layers`` GDN layers that maps ``inputs()`` [B,T,HIDDEN] to the same shape."""

    name: str
    build: Callable[[], nn.Module]
    layers: int = 1

    def inputs(self, seed: int = 0, B: int = 2, T: int = 80, dtype: torch.dtype = torch.float32) -> Tensor:
        gen = torch.Generator().manual_seed(seed)
        return torch.randn(B, T, HIDDEN, generator=gen, dtype=torch.float64).to(dtype)


def _sizes(k_heads: int, v_heads: int, key_dim: int, value_dim: int) -> dict[str, object]:
    return {
        "hidden_size": HIDDEN,
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights each time, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def qwen3_next(k_heads: int = 2, v_heads: int = 4, key_dim: int = 8, value_dim: int = 8) -> nn.Module:
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    config = Qwen3NextConfig(**_sizes(k_heads, v_heads, key_dim, value_dim))
    return _seeded(lambda: MODULES["qwen3_next"].Qwen3NextGatedDeltaNet(config, 0))


def qwen3_5(k_heads: int = 2, v_heads: int = 4, key_dim: int = 8, value_dim: int = 8) -> nn.Module:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**_sizes(k_heads, v_heads, key_dim, value_dim))
    return _seeded(lambda: MODULES["qwen3_5"].Qwen3_5GatedDeltaNet(config, 0))


def olmo_hybrid(k_heads: int = 2, v_heads: int = 2, key_dim: int = 8, value_dim: int = 16) -> nn.Module:
    """beta goes up to 2 here."""
    from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig

    config = OlmoHybridConfig(linear_allow_neg_eigval=True, **_sizes(k_heads, v_heads, key_dim, value_dim))
    return _seeded(lambda: MODULES["olmo_hybrid"].OlmoHybridGatedDeltaNet(config, 0))


class SoftmaxAttention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Hybrid(nn.Module):
    """Three Gated DeltaNet layers and one of softmax attention, in a Python loop with residuals, as decoders are."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([qwen3_next(), qwen3_next(), qwen3_next(), SoftmaxAttention()])
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in self.mixers)

    def forward(self, x: Tensor) -> Tensor:
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return x


MODELS = (
    Model("qwen3_next", qwen3_next),
    Model("qwen3_next_wide_values", lambda: qwen3_next(key_dim=8, value_dim=16)),
    Model("qwen3_next_wide_keys", lambda: qwen3_next(k_heads=1, v_heads=3, key_dim=16, value_dim=8)),
    Model("qwen3_5", qwen3_5),
    Model("olmo_hybrid", olmo_hybrid),
    Model("hybrid", lambda: _seeded(Hybrid), layers=3),
)
