"""One token: the recurrence as it is written, for decoding."""

from __future__ import annotations

import torch

from qlacompile.kernels.reference.chunk import reciprocal_norm


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor | None,
    scale: float,
    qk_l2norm_eps: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q, k [B, 1, Hk, K]``, ``v [B, 1, Hv, V]``, ``g, beta [B, 1, Hv]`` and ``state [B, Hv, K, V]``.

    Returns ``o [B, 1, Hv, V]`` and the new state ``[B, Hv, K, V]``, both of ``dtype``.
    """
    heads, width, values = v.shape[2], k.shape[3], v.shape[3]
    group = heads // k.shape[2]
    if qk_l2norm_eps is not None:
        q = q * reciprocal_norm(q, dtype, qk_l2norm_eps)
        k = k * reciprocal_norm(k, dtype, qk_l2norm_eps)
    v = v.to(dtype).reshape(-1, 1, values)
    k, q = k.to(dtype), q.to(dtype) * scale
    if group > 1:
        k, q = k.repeat_interleave(group, 2), q.repeat_interleave(group, 2)
    k, q = k.reshape(-1, 1, width), q.reshape(-1, 1, width)
    error = v
    if state is not None:
        state = state.to(dtype).reshape(-1, width, values)
        if g is not None:
            state = state * g.to(dtype).exp().reshape(-1, 1, 1)
        error = torch.baddbmm(v, k, state, alpha=-1)
    if beta is not None:
        error = error * beta.to(dtype).reshape(-1, 1, 1)
    if state is None:
        state = torch.bmm(k.mT, error)
    else:  # the decayed state is ours to change; the caller's is not
        state = state.baddbmm_(k.mT, error) if g is not None else torch.baddbmm(state, k.mT, error)
    o = torch.bmm(q, state)
    return o.view(-1, 1, heads, values), state.view(-1, heads, width, values)
