"""What an attack is: an ordinary program around Gated DeltaNet that a careless compiler answers wrongly.

Whatever is rewritten and whatever is not, values, gradients, dtypes and shapes must be those of the eager program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from near_misses.lookalike import read, write, zeros

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Attack:
    """``fn(*make_args())`` returns tensors; a module class is built anew for each run, and its buffers compared too."""

    name: str
    fn: Callable[..., Any]
    make_args: Callable[[], Args]
    grad: bool = True  # False: it writes to its arguments, or overwrites what a gradient needs
    bound: float = 2e-5  # relative, of outputs; gradients may always differ by 2e-5
    layout: bool = False  # outputs must be contiguous where those of eager are

    def build(self) -> Callable[..., Any]:
        return self.fn() if isinstance(self.fn, type) else self.fn


@dataclass(frozen=True)
class Sequence:
    """One compiled function called again and again: what the first call fixed must not hold for the later ones."""

    name: str
    fn: Callable[..., Any]
    calls: tuple[Args, ...]
    dynamic_dim: int | None = None  # of every tensor, from the first call on


def inputs(
    B: int = 2, T: int = 12, H: int = 3, K: int = 4, V: int = 5, dtype: torch.dtype = torch.float32, state: bool = False
) -> tuple[Tensor, ...]:
    """q, k of norm one, v, g, beta, and with ``state`` an initial one."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    q, k, v = draw(B, T, H, K), F.normalize(draw(B, T, H, K), dim=-1), draw(B, T, H, V)
    g, beta = F.logsigmoid(draw(B, T, H) + 1), torch.rand(B, T, H, generator=gen)
    found = [q, k, v, g, beta, *([draw(B, H, K, V)] if state else [])]
    return tuple(x.to(dtype) for x in found)


def changed(**maps: Callable[[Tensor], Tensor]) -> Callable[[], Args]:
    """The inputs, those named replaced by a function of them."""

    def make() -> Args:
        return tuple(maps[n](x) if n in maps else x for n, x in zip(("q", "k", "v", "g", "beta"), inputs()))

    return make


def with_state(**sizes: Any) -> Callable[[], Args]:
    return lambda: inputs(state=True, **sizes)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    S = zeros(q, v) if S is None else S
    outs = []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def same(x: Tensor) -> Tensor:
    return x


def in_step(q=same, k=same, v=same, g=same, beta=same, out=same, state=same) -> Callable[..., Any]:
    """The token loop that computes the given functions of its operands in each step."""
    of_q, of_k, of_v, of_g, of_beta = q, k, v, g, beta

    def fn(q, k, v, g, beta):
        S, outs = zeros(q, v), []
        for t in range(q.shape[1]):
            S = state(write(S, of_k(k[:, t]), of_v(v[:, t]), of_g(g[:, t]), of_beta(beta[:, t])))
            outs.append(out(read(S, of_q(q[:, t]))))
        return torch.stack(outs, 1), S

    return fn


def linear_gate(q, k, v, a, beta):
    """The decay factor is an input of its own, not the exponential of one."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * a[:, t][..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None]).sum(-2))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def chunked(q, k, v, g, beta, S=None, size=8, transposed=False):
    """The chunk form; the state is [B, H, V, K] when ``transposed``."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    B, H, T, K = q.shape
    V, q = v.shape[-1], q * K**-0.5
    if S is None:
        S = q.new_zeros(B, H, V, K) if transposed else q.new_zeros(B, H, K, V)
    outs, eye = [], torch.eye(size)
    for n in range(T // size):
        sl = slice(n * size, (n + 1) * size)
        qc, kc, vc, gc, bc = q[:, :, sl], k[:, :, sl], v[:, :, sl], g[:, :, sl], beta[:, :, sl]
        G = gc.cumsum(-1)
        D = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
        A = (bc[..., None] * (kc @ kc.mT) * D).tril(-1)
        Sk = S.transpose(-1, -2) if transposed else S
        rhs = bc[..., None] * (vc - G.exp()[..., None] * (kc @ Sk))
        u = torch.linalg.solve_triangular(A + eye, rhs, upper=False)
        outs.append(G.exp()[..., None] * (qc @ Sk) + ((qc @ kc.mT) * D) @ u)
        update = (kc * (G[..., -1:] - G).exp()[..., None]).mT @ u
        S = G[..., -1, None, None].exp() * S + (update.mT if transposed else update)
    return torch.cat(outs, 2).transpose(1, 2), S
