"""What a look-alike is: a loop around the Gated DeltaNet step whose Python makes some iteration different.

Whatever the compiler does with one, values and gradients must be those of the eager code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.spelling import canonical_inputs


@dataclass(frozen=True)
class LookAlike:
    """``fn(q, k, v, g, beta)`` returns a tuple of tensors."""

    name: str
    fn: Callable[..., Any]
    # False: iterations differ, so rolling the whole loop would be wrong, if not a stretch of it. True: rolling is
    # right. None: either, if the result is right.
    rollable: bool | None
    gdn: bool = False  # the whole is Gated DeltaNet after all, so a match of all its tokens is right
    random: bool = False  # draws random numbers: seed before each run
    mutates: bool = False  # writes into its arguments: clone them before each run, compare them after
    grads: bool = True  # False: eager autograd refuses it, because it overwrites what a gradient needs
    module: Callable[[], torch.nn.Module] | None = None  # if set, compile and call a fresh module instead of fn

    def make_args(self, seed: int = 0, T: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        c = canonical_inputs(seed, 2, T, 2, 2, 8, 8, dtype)
        return c.q, c.k, c.v, c.g, c.beta

    def build(self) -> Callable[..., Any]:
        """A fresh callable: a module that counts its steps must start from zero in each run."""
        return self.module() if self.module is not None else self.fn


def zeros(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])


def write(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Decay, error, write: one token's update of the state."""
    S = S * g.exp()[..., None, None]
    u = beta[..., None] * (v - (S * k[..., None]).sum(-2))
    return S + k[..., None] * u[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    return (S * q[..., None]).sum(-2) * q.shape[-1] ** -0.5
