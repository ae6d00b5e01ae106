"""The backward of :mod:`qlacompile.kernels.reference.chunk`, by hand; see there for the names.

With ``dO`` and the gradient ``dS'`` of the state that leaves a chunk:

    dU = P^T dO + d (K dS')       dR = T^T dU       Z = -beta e dR       dS = e[-1] dS' + Q^T (e dO) + K^T Z
    dV = beta dR                  dA = -beta dR U^T (strictly lower)      dP = dO U^T
    dQ = (e dO) S^T + (dP * D) K
    dK = Z S^T + (d U) dS'^T + (dA * D + its transpose) K + (dP * D)^T Q

A log decay at t scales every path from a token before t to one at or after t. Its gradient is the sum over exactly
these paths (rows >= t, columns < t of ``dA * A + dP * P``; rows >= t from S; columns < t to S'; S to S'), never a
difference of a row sum and a column sum: under strong decay that would be nothing but the rounding of large terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qlacompile.kernels.reference.chunk import Chunks, Scan


@dataclass
class Gradients:
    """Gradients in chunk layout; ``None`` where not asked for. ``q`` is that of the scaled queries."""

    q: torch.Tensor | None = None  # [M, Hk, C, K]
    k: torch.Tensor | None = None  # [M, Hk, C, K]
    v: torch.Tensor | None = None  # [M, H, C, V]
    g: torch.Tensor | None = None  # [M, H, C, 1]
    beta: torch.Tensor | None = None  # [M, H, C, 1]
    state: torch.Tensor | None = None  # [N, Hk, K, R * V]


@dataclass
class _Reverse:
    """What the reverse scan leaves behind. ``rows`` is 2C, or C if there is no gradient of the output."""

    dr: torch.Tensor  # [M, H, C, V]
    ze: torch.Tensor  # [M, Hk, rows, R * V]: Z over e dO
    kds: torch.Tensor  # [M, Hk, C, R * V]: K dS'
    dstates: torch.Tensor  # [M, Hk, K, R * V]: dS' of each chunk
    first: torch.Tensor  # [N, Hk, K, R * V]: the gradient of the initial state


def backward(
    x: Chunks, scan: Scan, do: torch.Tensor | None, dfinal: torch.Tensor, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of q, k, v, g, beta and the initial state, as far as ``needs`` asks.

    ``do [M, H, C, V]`` is ``None`` if the output is not used; ``dfinal [N, Hk, K, R * V]``; ``scan`` has its states.
    """
    need_q, need_k, need_v, need_g, need_beta, need_state = needs
    c = x.layout.chunk
    back = _reverse_scan(x, scan, do, dfinal)
    out = Gradients(state=back.first if need_state else None)
    if need_v:
        out.v = back.dr * x.beta
    if not (need_q or need_k or need_g or need_beta):
        return out

    u_t = scan.u.flatten(0, 1).mT
    states = torch.cat(scan.states)
    du = torch.empty_like(back.kds)  # d U
    torch.mul(x.by_group(scan.u), x.by_group(x.d), out=x.by_value(du))
    products = x.kq.new_empty((*back.ze.shape[:3], c))  # gradients of KK^T over QK^T, summed over the group
    paths = None
    if need_k or need_g or need_beta:
        da = torch.bmm(back.dr.flatten(0, 1), u_t).view_as(x.decay).neg_().tril_(-1)
        if need_g or need_beta:
            paths = da * x.a
            if need_beta:
                out.beta = _beta_gradient(x, scan, back, paths)
            paths.mul_(x.beta)
        if need_k:
            _sum_group(x, da.mul_(x.beta), x.decay, products[:, :, :c])
    if do is not None and (need_q or need_k or need_g):
        dp = torch.bmm(do.flatten(0, 1), u_t).view_as(x.decay)
        if paths is not None:
            paths.addcmul_(dp, x.p)
        if need_q or need_k:
            _sum_group(x, dp, x.decay, products[:, :, c:])
    if need_g and paths is not None:
        out.g = _gate_gradient(x, scan, back, states, paths, du)

    keys, keys_over_queries = x.kq[:, :, :c].flatten(0, 1), x.kq[:, :, : products.shape[2]].flatten(0, 1)
    if need_k:
        dk = torch.bmm(back.ze[:, :, :c].flatten(0, 1), states.mT)
        dk.baddbmm_(products[:, :, :c].flatten(0, 1), keys)
        dk.baddbmm_(products.flatten(0, 1).mT, keys_over_queries)
        dk.baddbmm_(du.flatten(0, 1), back.dstates.flatten(0, 1).mT)
        out.k = dk.view(*x.kq.shape[:2], c, -1)
    if need_q and do is not None:
        dq = torch.bmm(back.ze[:, :, c:].flatten(0, 1), states.mT)
        dq.baddbmm_(products[:, :, c:].flatten(0, 1), keys)
        out.q = dq.view(*x.kq.shape[:2], c, -1)
    return out


def _reverse_scan(x: Chunks, scan: Scan, do: torch.Tensor | None, dfinal: torch.Tensor) -> _Reverse:
    m, hk, _, width = x.kq.shape
    c, r, v, counts = x.layout.chunk, x.group, x.v.shape[3], x.layout.counts
    ze = x.v.new_empty((m, hk, c if do is None else 2 * c, r * v))
    kds = x.v.new_empty((m, hk, c, r * v))
    dr = torch.empty_like(x.v)
    buffer = x.v.new_empty((counts[0], hk, r, c, v))
    from_o: tuple[torch.Tensor | None, ...] = (None,) * len(counts)
    from_q: tuple[torch.Tensor | None, ...] = (None,) * len(counts)
    if do is not None:
        edo = ze[:, :, c:]
        torch.mul(x.by_group(do), x.by_group(x.e), out=x.by_value(edo))
        from_o = x.steps(x.by_group(torch.bmm(x.p.flatten(0, 1).mT, do.flatten(0, 1)).view_as(do)))
        from_q = x.steps(torch.bmm(x.kq[:, :, c:].flatten(0, 1).mT, edo.flatten(0, 1)).view(m, hk, width, r, v))
    parts = zip(
        counts,
        x.matrices(x.kq[:, :, :c]),
        x.matrices(x.inverse.mT),
        x.steps(x.by_group(x.beta * x.e).neg_()),
        x.steps(x.by_group(x.d)),
        x.steps(x.by_group(x.e[:, :, -1:]).transpose(2, 3)),
        x.matrices(kds),
        x.steps(x.by_value(kds)),
        x.matrices(dr),
        x.steps(x.by_group(dr)),
        x.matrices(ze[:, :, :c]),
        x.steps(x.by_value(ze[:, :, :c])),
        from_o,
        from_q,
    )
    dstates: list[torch.Tensor] = []
    dfinal = dfinal.flatten(0, 1)
    running = dfinal[:0]
    for n, k_n, tt_n, nbe_n, d_n, last_n, kds_out, kds_n, dr_out, dr_n, z_flat, z_out, o_n, q_n in reversed(
        list(parts)
    ):
        if len(running) < n * hk:  # sequences whose last chunk this is
            running = torch.cat((running, dfinal[len(running) : n * hk]))
        dstates.append(running)
        torch.bmm(k_n, running, out=kds_out)
        out = buffer[:n]
        du = torch.mul(kds_n, d_n, out=out) if o_n is None else torch.addcmul(o_n, d_n, kds_n, out=out)
        torch.bmm(tt_n, du.view(-1, c, v), out=dr_out)
        torch.mul(dr_n, nbe_n, out=z_out)
        before = running.view(n, hk, width, r, v)
        before = before * last_n if q_n is None else torch.addcmul(q_n, before, last_n)
        running = before.view_as(running).baddbmm_(k_n.mT, z_flat)
    first = torch.cat((running, dfinal[len(running) :])).unflatten(0, (-1, hk))
    return _Reverse(dr, ze, kds, torch.cat(dstates[::-1]).view(m, hk, width, r * v), first)


def _sum_group(x: Chunks, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """``out [M, Hk, C, C]`` becomes the sum over the value heads of a group of ``left * right [M, H, C, C]``."""
    if x.group == 1:
        torch.mul(left, right, out=out)
    else:
        torch.sum(x.by_group(left * right), 2, out=out)


def _beta_gradient(x: Chunks, scan: Scan, back: _Reverse, paths: torch.Tensor) -> torch.Tensor:
    """``dbeta [M, H, C, 1]``; ``paths`` is ``-dR U^T * A``."""
    ks = x.by_value(scan.kqs[:, :, : x.layout.chunk])
    error = torch.addcmul(x.by_group(x.v), x.by_group(x.e), ks, value=-1).view_as(x.v)
    return error.mul_(back.dr).sum(-1, keepdim=True).add_(paths.sum(-1, keepdim=True))


def _gate_gradient(
    x: Chunks, scan: Scan, back: _Reverse, states: torch.Tensor, paths: torch.Tensor, du: torch.Tensor
) -> torch.Tensor:
    """``dg [M, H, C, 1]``; ``paths [M, H, C, C]`` is ``dA * A + dP * P``."""
    m, hk, rows, width = back.ze.shape
    c, r = x.layout.chunk, x.group
    ones = paths.new_ones((c, c))
    later, earlier = ones.tril(), ones.triu(1)  # [i >= t] and [j < t], columns are t
    inside = torch.mm(paths.view(-1, c), earlier).view_as(paths).mul_(later).sum(2)

    from_state = (back.ze * scan.kqs[:, :, :rows]).view(m, hk, rows // c, c, r, -1).sum((2, 5))
    to_state = (du * back.kds).view(m, hk, c, r, -1).sum(4)
    through = (states.view(m, hk, -1, r, width // r) * back.dstates.view(m, hk, -1, r, width // r)).sum((2, 4))
    dg = inside.view(m, hk, r, c)
    dg += from_state.transpose(2, 3) @ later
    dg += to_state.transpose(2, 3) @ earlier
    dg += through.unsqueeze(3) * x.by_group(x.e[:, :, -1:]).squeeze(3)
    return dg.view(m, hk * r, c, 1)


def unnormalised_keys(x: Chunks, dk: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the keys as given, from that of the normalised keys; ``dk [M, Hk, C, K]``."""
    c = x.layout.chunk
    if dk is None or x.rnorm is None:
        return dk
    return _unnormalised(dk, x.kq[:, :, :c], x.rnorm[:, :, :c])


def unscaled_queries(x: Chunks, dq: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """The gradient of the queries as given, from that of the scaled and normalised queries; ``dq [M, Hk, C, K]``."""
    c = x.layout.chunk
    if dq is None:
        return None
    dq = dq * scale
    if x.rnorm is None or scale == 0:
        return dq
    return _unnormalised(dq, x.kq[:, :, c:] / scale, x.rnorm[:, :, c:])


def _unnormalised(dy: torch.Tensor, y: torch.Tensor, rnorm: torch.Tensor) -> torch.Tensor:
    """``y = x * rnorm(x)``, so ``dx = rnorm * (dy - y (y . dy))``."""
    return torch.addcmul(dy, y, torch.linalg.vecdot(y, dy).unsqueeze(-1), value=-1).mul_(rnorm)
