"""The chunked gated delta rule as matrix multiplications, forward and backward.

Names, for one chunk of one head with C tokens, keys ``K [C, K]``, scaled queries ``Q``, values ``V [C, V]``, ``G`` the
running sum of the log decays and ``S`` the state that enters the chunk:

    D[i,j] = exp(G[i] - G[j]) for j <= i     e = exp(G)      d = exp(G[-1] - G)
    A = KK^T * D (strictly lower)            P = QK^T * D    T = (I + beta A)^-1
    U = T (beta (V - e (K S)))               O = e (Q S) + P U              S' = e[-1] S + K^T (d U)

Every decay is the exponential of a difference that is not positive, so nothing overflows, and the differences are taken
of sums in float64: in float32 a strong decay early in a chunk would blur all that follow it. The decays scale rows on
the value side, never the keys, so that all value heads of a group share one ``K``: with the state as ``[Hk, K, R * V]``
(R value heads for each of Hk key heads) products with it are one matrix multiplication for the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from qlacompile.kernels.reference.arena import Arena
from qlacompile.kernels.reference.layout import Layout
from qlacompile.kernels.reference.precision import wide_dtype

# exp() of these is exactly zero: clamping changes no value and no gradient, and keeps -inf out of the differences
_ZERO_DECAY = {torch.float32: -110.0, torch.float64: -750.0}


@dataclass(frozen=True)
class Chunks:
    """What does not depend on the state. ``M`` chunks, ``H = Hk * R`` value heads; ``kq``: keys over scaled queries."""

    layout: Layout
    group: int
    kq: torch.Tensor  # [M, Hk, 2C, K]
    rnorm: torch.Tensor | None  # [M, Hk, 2C, 1], what kq was multiplied by to be normalised; zero in padding
    v: torch.Tensor  # [M, H, C, V]
    beta: torch.Tensor  # [M, H, C, 1]
    e: torch.Tensor  # [M, H, C, 1]
    d: torch.Tensor  # [M, H, C, 1]
    decay: torch.Tensor  # [M, H, C, C], lower triangle with its diagonal
    a: torch.Tensor  # [M, H, C, C], only what is below the diagonal counts
    p: torch.Tensor  # [M, H, C, C]
    inverse: torch.Tensor  # [M, H, C, C]

    def by_value(self, x: torch.Tensor) -> torch.Tensor:
        """A view of ``[M, Hk, rows, R * V]`` as ``[M, Hk, R, rows, V]``."""
        m, hk, rows, _ = x.shape
        return x.view(m, hk, rows, self.group, -1).transpose(2, 3)

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """A view of ``[M, H, rows, columns]`` as ``[M, Hk, R, rows, columns]``."""
        m, heads, rows, columns = x.shape
        return x.view(m, heads // self.group, self.group, rows, columns)

    def steps(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``x [M, ...]`` cut into the steps of the scan."""
        return x.split(self.layout.counts)

    def matrices(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``x [M, heads, rows, columns]`` cut into steps of ``[sequences * heads, rows, columns]``."""
        return x.flatten(0, 1).split([n * x.shape[1] for n in self.layout.counts])


def arena(layout: Layout, dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor) -> Arena:
    """Room for all temporaries of :func:`prepare`, :func:`scan_forward` and :func:`outputs`."""
    (hk, width), (hv, values) = k.shape[2:], v.shape[2:]
    keys, squares = 2 * hk * width, (4 * hv + 2 * hk * (hk != hv)) * layout.chunk
    return Arena(v, dtype, layout.chunks * layout.chunk * (keys + squares + 6 * hv * values))


def prepare(
    memory: Arena,
    layout: Layout,
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float,
    qk_l2norm_eps: float | None,
) -> Chunks:
    """Bring the inputs into chunks and do all work that is independent of the state."""
    m, c = layout.chunks, layout.chunk
    hk, hv = k.shape[2], v.shape[2]
    kq = memory.take(m, hk, 2 * c, k.shape[3])
    keys, queries = kq[:, :, :c], kq[:, :, c:]
    layout.load(k, keys)
    layout.load(q, queries, scale)
    rnorm = None
    if qk_l2norm_eps is not None:
        rnorm = kq.new_empty((m, hk, 2 * c, 1))
        layout.load(reciprocal_norm(k, dtype, qk_l2norm_eps), rnorm[:, :, :c])
        layout.load(reciprocal_norm(q, dtype, qk_l2norm_eps), rnorm[:, :, c:])
        kq.mul_(rnorm)
    values = memory.take(m, hv, c, v.shape[3])
    layout.load(v, values)
    betas = v.new_empty((m, hv, c, 1), dtype=dtype)
    if beta is None:
        betas.fill_(1)
    else:
        layout.load(beta.unsqueeze(-1), betas)

    sums = v.new_zeros((2, m, hv, c, 1), dtype=wide_dtype(v.device))
    if g is not None:
        layout.load(g.unsqueeze(-1), sums[1])
        torch.cumsum(sums[1].clamp_(min=_ZERO_DECAY[dtype]), 2, out=sums[0])
    start = sums[0]
    decay = memory.take(m, hv, c, c)
    torch.sub(start, start.mT, out=decay)
    decay.exp_().tril_()  # selects, so an overflow above the diagonal goes away without a trace
    torch.sub(start[:, :, -1:], start, out=sums[1])
    e, d = sums.exp_().to(dtype).unbind(0)

    products = memory.take(m, hk, 2 * c, c)
    torch.bmm(kq.view(m * hk, 2 * c, -1), keys.flatten(0, 1).mT, out=products.view(m * hk, 2 * c, c))
    ap = products if hk == hv else memory.take(m, hv, 2 * c, c)
    torch.mul(products.view(m, hk, 1, 2, c, c), decay.view(m, hk, -1, 1, c, c), out=ap.view(m, hk, -1, 2, c, c))
    a, p = ap.view(m, hv, 2, c, c).unbind(2)
    inverse = _unit_inverse(torch.mul(a, betas, out=memory.take(m, hv, c, c)))
    return Chunks(layout, hv // hk, kq, rnorm, values, betas, e, d, decay, a, p, inverse)


def reciprocal_norm(x: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor:
    """``1 / sqrt(sum(x^2) + eps)`` of ``x [..., D]`` as ``[..., 1]``."""
    x = x.to(dtype)
    return torch.linalg.vecdot(x, x).add_(eps).rsqrt_().unsqueeze(-1)


def _unit_inverse(a: torch.Tensor) -> torch.Tensor:
    """``(I + a)^-1`` for strictly lower ``a [M, H, C, C]``; its diagonal and what is above are not read.

    By substitution: the product of powers ``(I - a)(I + a^2)...`` cancels catastrophically for beta near 2.
    """
    eye = _eye(a.shape[-1], a.dtype, a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, left=False, unitriangular=True)


@cache
def _eye(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.eye(n, dtype=dtype, device=device)


@dataclass
class Scan:
    """What the scan over chunks leaves behind."""

    kqs: torch.Tensor  # [M, Hk, 2C, R * V]: K S over Q S
    u: torch.Tensor  # [M, H, C, V]
    states: list[torch.Tensor]  # S of each step, [sequences * Hk, K, R * V], if asked for
    final: torch.Tensor  # [N, Hk, K, R * V], unless the states were asked for


def scan_forward(memory: Arena, x: Chunks, state: torch.Tensor, keep_states: bool) -> Scan:
    """Scan the chunks. ``state [N, Hk, K, R * V]`` becomes the final state in place, unless the states are kept."""
    m, hk, rows, _ = x.kq.shape
    c, r, v = x.layout.chunk, x.group, x.v.shape[3]
    kqs, u = memory.take(m, hk, rows, r * v), memory.take(*x.v.shape)
    bv = x.by_group(torch.mul(x.v, x.beta, out=memory.take(*x.v.shape)))
    be = x.by_group(x.beta * x.e)
    last = x.by_group(x.e[:, :, -1:]).transpose(2, 3)  # [M, Hk, 1, R, 1]
    buffer, du = x.v.new_empty((2, x.layout.counts[0], hk, c, r * v)).unbind(0)
    rhs_buffer, du_view = buffer.view(-1, hk, r, c, v), x.by_value(du)
    parts = zip(
        x.layout.counts,
        x.matrices(x.kq),
        x.matrices(x.kq[:, :, :c].mT),
        x.matrices(x.inverse),
        x.steps(bv),
        x.steps(be),
        x.steps(x.by_group(x.d)),
        x.steps(last),
        x.matrices(kqs),
        x.steps(x.by_value(kqs[:, :, :c])),
        x.matrices(u),
        x.steps(x.by_group(u)),
    )
    states: list[torch.Tensor] = []
    running = state.flatten(0, 1)
    for n, kq_n, kt_n, t_n, bv_n, be_n, d_n, last_n, kqs_out, ks_n, u_out, u_n in parts:
        running = running[: n * hk]
        torch.bmm(kq_n, running, out=kqs_out)
        rhs = torch.addcmul(bv_n, be_n, ks_n, value=-1, out=rhs_buffer[:n])
        torch.bmm(t_n, rhs.view(n * hk * r, c, v), out=u_out)
        torch.mul(u_n, d_n, out=du_view[:n])
        if keep_states:
            states.append(running)
            running = torch.mul(running.view(n, hk, -1, r, v), last_n).view_as(running)
        else:
            running.view(n, hk, -1, r, v).mul_(last_n)
        running.baddbmm_(kt_n, du[:n].flatten(0, 1))
    return Scan(kqs, u, states, state)


def outputs(memory: Arena, x: Chunks, scan: Scan) -> torch.Tensor:
    """``O [M, H, C, V]``."""
    c = x.layout.chunk
    o = memory.take(*scan.u.shape)
    torch.bmm(x.p.flatten(0, 1), scan.u.flatten(0, 1), out=o.flatten(0, 1))
    qs = x.by_value(scan.kqs[:, :, c:])
    x.by_group(o).addcmul_(qs, x.by_group(x.e))
    return o
