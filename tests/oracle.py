"""The gated delta rule token by token in float64 with autograd: what every other way to compute it is compared with."""

from __future__ import annotations

from itertools import pairwise

import torch


def recurrence(q, k, v, g=None, beta=None, initial_state=None, scale=1.0, dtype=torch.float64):
    """One batch of equally long sequences, in ``dtype``; q, k ``[B, T, Hk, K]``, v ``[B, T, Hv, V]``.

    Returns ``o [B, T, Hv, V]`` and the final state ``[B, Hv, K, V]``, differentiable.
    """
    batch, tokens, heads, values = v.shape
    group = heads // k.shape[2]
    q, k, v = q.to(dtype).repeat_interleave(group, 2), k.to(dtype).repeat_interleave(group, 2), v.to(dtype)
    state = q.new_zeros(batch, heads, k.shape[3], values) if initial_state is None else initial_state.to(dtype)
    out = []
    for t in range(tokens):
        if g is not None:
            state = state * g[:, t].to(dtype).exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        if beta is not None:
            error = error * beta[:, t].to(dtype)[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1) if out else v.new_zeros(v.shape), state


def gated_delta_rule(
    q, k, v, g=None, beta=None, initial_state=None, cu_seqlens=None, scale=1.0, qk_l2norm_eps=None, dtype=torch.float64
):
    """The whole operator: normalised q and k if an eps is given, packed sequences if ``cu_seqlens`` is given."""
    if qk_l2norm_eps is not None:
        q, k = (x.to(dtype) * (x.to(dtype).square().sum(-1, keepdim=True) + qk_l2norm_eps).rsqrt() for x in (q, k))
    if cu_seqlens is None:
        return recurrence(q, k, v, g, beta, initial_state, scale, dtype)
    outs, states = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        part = [None if x is None else x[:, start:stop] for x in (q, k, v, g, beta)]
        h0 = None if initial_state is None else initial_state[n : n + 1]
        o, state = recurrence(*part, h0, scale, dtype)
        outs.append(o)
        states.append(state)
    tail = v[:, bounds[-1] :].to(dtype) * 0
    return torch.cat([*outs, torch.zeros_like(tail)], 1), torch.cat(states)
