"""What a near miss is: a loop that looks like Gated DeltaNet, computes something else, and must not be rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.spelling import Canonical, canonical_inputs, token_oracle

Randn = Callable[..., Tensor]


@dataclass(frozen=True)
class NearMiss:
    """``fn(q, k, v, g, beta, *extra)`` returns ``(o, state)`` in canonical layouts."""

    name: str
    fn: Callable[..., tuple[Tensor, Tensor]]
    condition: str  # what does not hold, in words
    codes: frozenset[str]  # any of these may be the refusal
    family: str | None = None  # what it is, if it has a name
    extra: Callable[[Canonical, Randn], tuple[Tensor, ...]] | None = None  # arguments after beta
    scale_v: float = 1.0  # magnitude of v, where the difference shows at large values only
    legal: bool = False  # it is Gated DeltaNet after all, with some argument fixed
    same_value: bool = False  # only the gradient differs

    def make(
        self,
        seed: int = 0,
        B: int = 2,
        T: int = 24,
        H: int = 2,
        K: int = 8,
        V: int = 12,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, ...]:
        c = canonical_inputs(seed, B, T, H, H, K, V, dtype)
        gen = torch.Generator().manual_seed(seed + 1000)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen, dtype=torch.float64).to(dtype)

        extra = self.extra(c, randn) if self.extra else ()
        return (c.q, c.k, c.v * self.scale_v, c.g, c.beta, *extra)

    def nearest(self, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """``(o, state)`` of Gated DeltaNet for the same q, k, v, gate and beta: the wrong answer."""
        q, k, v, g, beta = (a.detach().double() for a in args[:5])
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
        return token_oracle(Canonical(q, k, v, g, beta, q.shape[-1] ** -0.5, state))
