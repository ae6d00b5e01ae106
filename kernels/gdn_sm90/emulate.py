"""The kernels of this folder in PyTorch: the same chunks, the same order, the same roundings.

The tensor-core kernels can not run without a Hopper GPU; their mathematics can. Each function here is one kernel, takes
what the kernel reads and returns what it writes. ``rd`` rounds a value as the kernel does when it becomes an operand of
a tensor-core product or goes to memory in the input's dtype; with ``rd = identity`` in float64 the functions are exact.

Layout: sequences are cut in chunks of ``C`` tokens, heads come before tokens: q, k ``[B, Hk, n, C, K]``,
v ``[B, Hv, n, C, V]``, g and beta ``[B, Hv, n, C]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

C = 64
MIN_LOG_DECAY = -100.0  # exp(-100) is zero to fp32, and 64 of them summed still leave 11 bits for the differences

Round = Callable[[torch.Tensor], torch.Tensor]


def rounder(dtype: torch.dtype) -> Round:
    """Round to ``dtype`` and come back."""
    return lambda x: x.to(dtype).to(x.dtype)


class Chunked(NamedTuple):
    """What the kernels read: chunked, padded with zeros (a zero token leaves the state as it is)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def chunked(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """``[B, T, H, ...] -> [B, H, n, C, ...]``."""
    pad = -x.shape[1] % C
    x = x.to(compute).movedim(2, 1)
    x = torch.cat([x, x.new_zeros(x.shape[0], x.shape[1], pad, *x.shape[3:])], dim=2)
    return x.unflatten(2, (-1, C))


def unchunked(x: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The inverse of :func:`chunked`."""
    return x.flatten(2, 3)[:, :, :seq_len].movedim(1, 2)


def decay(G: torch.Tensor, diagonal: int) -> torch.Tensor:
    """``exp(G_i - G_j)`` for ``i - j >= -diagonal``, zero elsewhere; masked before exp, so nothing overflows."""
    seen = torch.ones(C, C, dtype=torch.bool, device=G.device).tril(diagonal)
    return torch.where(seen, G[..., :, None] - G[..., None, :], -torch.inf).exp()


def solve(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, rd: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """G (cumulative log decay) and N = (I + L)^-1 - I with L_ij = beta_i exp(G_i - G_j) k_i.k_j below the diagonal.

    The unit diagonal is left out of what is stored: it is applied in fp32 by those who use N.
    """
    G = torch.where(g < MIN_LOG_DECAY, MIN_LOG_DECAY, g).cumsum(-1)
    kk = (k @ k.mT).repeat_interleave(g.shape[1] // k.shape[1], dim=1)
    L = beta[..., None] * kk * decay(G, -1)
    eye = torch.eye(C, dtype=k.dtype, device=k.device).expand_as(L)
    inverse = torch.linalg.solve_triangular(L + eye, eye, upper=False, unitriangular=True)
    return G, rd(inverse - eye)


class States(NamedTuple):
    """What the backward needs of the forward scan: per chunk the state before it and its u."""

    S: torch.Tensor  # [B, Hv, n, K, V]
    u: torch.Tensor  # [B, Hv, n, C, V]


def scan(
    c: Chunked, G: torch.Tensor, N: torch.Tensor, S: torch.Tensor, scale: float, rd: Round
) -> tuple[torch.Tensor, torch.Tensor, States]:
    """Chunk after chunk; returns o, the final state and the :class:`States`."""
    rep = c.v.shape[1] // c.k.shape[1]
    outs, starts, us = [], [], []
    for n in range(c.v.shape[2]):
        q = c.q[:, :, n].repeat_interleave(rep, dim=1)
        k = c.k[:, :, n].repeat_interleave(rep, dim=1)
        beta, Gn = c.beta[:, :, n, :, None], G[:, :, n]
        e, r, last = Gn.exp()[..., None], (Gn[..., -1:] - Gn).exp()[..., None], Gn[..., -1].exp()[..., None, None]
        P = rd(scale * (q @ k.mT) * decay(Gn, 0))
        Sr = rd(S)
        x = beta * (c.v[:, :, n] - e * (k @ Sr))
        u = x + N[:, :, n] @ rd(x)
        outs.append(scale * e * (q @ Sr) + P @ rd(u))
        starts.append(Sr)
        us.append(rd(u))
        S = last * S + k.mT @ rd(r * u)
    return torch.stack(outs, 2), S, States(torch.stack(starts, 2), torch.stack(us, 2))


class Reverse(NamedTuple):
    """What the reverse scan leaves per chunk: the gradient of the state after it, and of x."""

    dS: torch.Tensor  # noqa: N815
    dx: torch.Tensor


def scan_reverse(
    c: Chunked, G: torch.Tensor, N: torch.Tensor, do: torch.Tensor, dS: torch.Tensor, scale: float, rd: Round
) -> tuple[torch.Tensor, torch.Tensor, Reverse]:
    """Chunk before chunk; returns dv, the gradient of the initial state and :class:`Reverse`."""
    rep = c.v.shape[1] // c.k.shape[1]
    count = c.v.shape[2]
    # The kernel carries dS / scale, and within a chunk that over e^G of the first token: do is then not rounded where
    # the gate is 0, nor in the first token, which outweighs the others under strong decay.
    norm = scale or 1.0
    dS = dS / norm
    dvs, ends, dxs = [[None] * count for _ in range(3)]
    for n in reversed(range(count)):
        q = c.q[:, :, n].repeat_interleave(rep, dim=1)
        k = c.k[:, :, n].repeat_interleave(rep, dim=1)
        beta, Gn, don = c.beta[:, :, n, :, None], G[:, :, n], do[:, :, n]
        e, r = Gn.exp()[..., None], (Gn[..., -1:] - Gn).exp()[..., None]
        P = rd(scale * (q @ k.mT) * decay(Gn, 0))
        dSr = rd(dS)
        du = norm * r * (k @ dSr) + P.mT @ don
        dx = du + N[:, :, n].mT @ rd(du)
        dvs[n], ends[n], dxs[n] = beta * dx, norm * dSr, rd(dx)
        lead = (Gn - Gn[..., :1]).exp()[..., None]
        chunk = q.mT @ rd(scale / norm * lead * don) - k.mT @ rd(beta * lead * dx / norm)
        dS = e[..., :1, :] * (lead[..., -1:, :] * dS + chunk)
    return torch.stack(dvs, 2), norm * dS, Reverse(torch.stack(ends, 2), torch.stack(dxs, 2))


def gradients(
    c: Chunked, G: torch.Tensor, do: torch.Tensor, states: States, rev: Reverse, scale: float, rd: Round
) -> tuple[torch.Tensor, ...]:
    """dq, dk (summed over the v heads of a k head), dg and dbeta; every chunk on its own."""
    rep = c.v.shape[1] // c.k.shape[1]
    q, k = c.q.repeat_interleave(rep, dim=1), c.k.repeat_interleave(rep, dim=1)
    beta = c.beta[..., None]
    e, r, last = G.exp()[..., None], (G[..., -1:] - G).exp()[..., None], G[..., -1].exp()

    oS, xS, uS = do @ states.S.mT, rev.dx @ states.S.mT, states.u @ rev.dS.mT
    below = decay(G, -1)
    dP = scale * (do @ states.u.mT)
    dL = -beta * (rev.dx @ states.u.mT) * below
    diagonal = torch.diag_embed(torch.diagonal(dP, dim1=-2, dim2=-1))
    attn = dP * below

    def group(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, rep)).sum(2)

    attn_r, dL_r = rd(attn + diagonal), rd(dL)
    dq = group(scale * e * oS + attn_r @ k)
    dk = group(r * uS - beta * e * xS + attn_r.mT @ q + dL_r @ k + dL_r.mT @ k)

    kk, qk = k @ k.mT, q @ k.mT
    # the diagonal does not depend on the gate and is left out: under strong decay it is 1e9 times the rest
    W = attn * qk + dL * kk
    kx = (e * k * xS).sum(-1)
    read = (scale * e * q * oS).sum(-1) - c.beta * kx
    write = (r * k * uS).sum(-1)
    carry = last * (states.S * rev.dS).sum((-2, -1))
    # dg_t collects what crosses the boundary before token t: reads at or after t, writes before t
    later = read + W.sum(-1) - W.sum(-2)
    suffix = later.flip(-1).cumsum(-1).flip(-1)
    before = torch.cat([torch.zeros_like(write[..., :1]), write[..., :-1].cumsum(-1)], dim=-1)
    dg = suffix + before + carry[..., None]
    dbeta = (rev.dx * c.v).sum(-1) - kx - ((rev.dx @ states.u.mT) * below * kk).sum(-1)
    return dq, dk, dg, dbeta


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor,
    scale: float,
    *,
    dtype: torch.dtype | None,
    compute: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Forward and backward on ``[B, T, H, D]`` inputs. ``dtype=None`` rounds nothing."""
    rd: Round = rounder(dtype) if dtype is not None else (lambda x: x)
    T = q.shape[1]
    c = Chunked(*(chunked(x, compute) for x in (q, k, v, g, beta)))
    don = chunked(do, compute)
    G, N = solve(c.k, c.g, c.beta, rd)
    o, ht, states = scan(c, G, N, initial_state.to(compute), scale, rd)
    dv, dh0, rev = scan_reverse(c, G, N, don, dht.to(compute), scale, rd)
    dq, dk, dg, dbeta = gradients(c, G, don, states, rev, scale, rd)
    out = {"o": rd(o), "dq": rd(dq), "dk": rd(dk), "dv": rd(dv), "dg": dg, "dbeta": dbeta}
    out = {name: unchunked(x, T) for name, x in out.items()}
    return out | {"ht": ht, "dh0": dh0}
