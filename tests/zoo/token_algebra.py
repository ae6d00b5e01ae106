"""Token loops that are Gated DeltaNet after some algebra: the same function, other operations or other roles."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zoo.spelling import Canonical, Spelling


def beta_folded(q, k, v, g, beta):
    """beta multiplied into v and into the read key before the loop; the write key stays as it is."""
    B, T, H, K = q.shape
    kb, vb = k * beta[..., None], v * beta[..., None]
    S = q.new_zeros(B, H, K, v.shape[-1])
    o = torch.zeros_like(v)
    for t in range(T):
        S = S * g[:, t, :, None, None].exp()
        S = S + k[:, t].unsqueeze(-1) * (vb[:, t] - (S * kb[:, t].unsqueeze(-1)).sum(-2)).unsqueeze(-2)
        o[:, t] = (S * q[:, t].unsqueeze(-1)).sum(-2) * K**-0.5
    return o, S


def erase_then_write(q, k, v, g, beta):
    """Two updates a step: erase what the key holds, then write."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        kt, b = k[:, t].unsqueeze(-1), beta[:, t].view(B, H, 1, 1)
        S = g[:, t].exp().view(B, H, 1, 1) * S
        S = S - b * kt * (kt.transpose(-1, -2) @ S)
        S = S + b * kt * v[:, t].unsqueeze(-2)
        outs.append((S.transpose(-1, -2) @ q[:, t].unsqueeze(-1)).squeeze(-1) * K**-0.5)
    return torch.stack(outs, 1), S


def transition_matrix(q, k, v, g, beta):
    """S <- alpha (I - beta k k^T) S + beta k v^T, with the matrix written out."""
    B, T, H, K = q.shape
    eye = torch.eye(K, dtype=q.dtype)
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        kk = k[:, t, :, :, None] * k[:, t, :, None, :]
        A = g[:, t].exp()[..., None, None] * (eye - beta[:, t, :, None, None] * kk)
        S = A @ S + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    return torch.stack(outs, 1), S


def read_before_decay(q, k, v, g, beta):
    """Reads the state before its decay, and applies the decay to what was read: the same error."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        a = g[:, t].exp()
        read = a[..., None] * torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        u = beta[:, t][..., None] * (v[:, t] - read)
        S = a[..., None, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    return torch.stack(outs, 1), S


def negative_error(q, k, v, g, beta):
    """A gradient step on ||S k - v||^2 / 2 after the decay, S [V,K]."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, v.shape[-1], K)
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        grad = (torch.einsum("bhvk,bhk->bhv", S, k[:, t]) - v[:, t])[..., None] * k[:, t][..., None, :]
        S = S - beta[:, t][..., None, None] * grad
        outs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(outs, 1), S


def output_from_parts(q, k, v, g, beta):
    """o = S~^T q + (q.k) u, from the state before the write: the read of the new state, multiplied out."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        o = torch.einsum("bhk,bhkv->bhv", q[:, t], S) + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * u
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(o * K**-0.5)
    return torch.stack(outs, 1), S


def in_place_state(q, k, v, g, beta):
    """The state is one buffer, changed by mul_ and add_."""
    B, T, H, K = q.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype)
    o = torch.zeros_like(v)
    for t in range(T):
        S.mul_(g[:, t].exp()[..., None, None])
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None]).sum(-2))
        S += k[:, t][..., None] * u[..., None, :]
        o[:, t] = (S * q[:, t][..., None]).sum(-2) * K**-0.5
    return o, S


def repeat_before(q, k, v, g, beta):
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    S = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), S


def repeat_in_step(q, k, v, g, beta):
    r = v.shape[2] // q.shape[2]
    S = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        qt = q[:, t].repeat_interleave(r, dim=1)
        kt = k[:, t].repeat_interleave(r, dim=1)
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - torch.einsum("bhk,bhkv->bhv", kt, S)) * beta[:, t, :, None]
        S = S + torch.einsum("bhk,bhv->bhkv", kt, u)
        outs.append(torch.einsum("bhk,bhkv->bhv", qt, S) * q.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), S


def expand_before(q, k, v, g, beta):
    B, T, Hk, K = q.shape
    r = v.shape[2] // Hk
    q = q[:, :, :, None].expand(B, T, Hk, r, K).reshape(B, T, Hk * r, K)
    k = k[:, :, :, None].expand(B, T, Hk, r, K).reshape(B, T, Hk * r, K)
    S = q.new_zeros(B, Hk * r, K, v.shape[-1])
    o = torch.zeros_like(v)
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        S = S + k[:, t, ..., None] * u[..., None, :]
        o[:, t] = (S * q[:, t, ..., None]).sum(-2) * K**-0.5
    return o, S


def normalised_in_step(q, k, v, g, beta):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        qt = F.normalize(q[:, t], dim=-1)
        kt = F.normalize(k[:, t], dim=-1)
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * kt[..., None]).sum(-2)) * beta[:, t, :, None]
        S = S + kt[..., None] * u[..., None, :]
        outs.append((S * qt[..., None]).sum(-2) * K**-0.5)
    return torch.stack(outs, 1), S


def beta_on_value(q, k, v, g, beta):
    """beta scales the value alone: Gated DeltaNet with values beta v, and beta = 1."""
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * v[:, t] - (S * k[:, t][..., None]).sum(-2)
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append((S * q[:, t][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def _on_value(c: Canonical):
    return c.q, c.k, c.v, c.g, c.beta


def _on_value_back(q, k, v, g, beta) -> Canonical:
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return Canonical(q, k, v * beta[..., None], g, torch.ones_like(beta), q.shape[-1] ** -0.5, state)


def raw_gates(q, k, v, a, b, A_log, dt_bias):
    """The layer's own gates inside the function: log decay from (a, A_log, dt_bias), beta = 2 sigmoid(b)."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    rate = -A_log.exp()
    outs = []
    for t in range(T):
        g = rate * F.softplus(a[:, t] + dt_bias)
        S = S * g.exp()[..., None, None]
        u = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)) * (2 * torch.sigmoid(b[:, t]))[..., None]
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * K**-0.5, S))
    return torch.stack(outs, 1), S


def _raw(c: Canonical):
    H = c.v.shape[2]
    gen = torch.Generator().manual_seed(int(c.q.shape[1]))
    A_log = torch.rand(H, generator=gen).to(c.q.dtype)
    dt_bias = torch.rand(H, generator=gen).to(c.q.dtype)
    return c.q, c.k, c.v, c.g * 3, c.beta.logit() - 1, A_log, dt_bias


def _raw_back(q, k, v, a, b, A_log, dt_bias) -> Canonical:
    g = -A_log.exp() * F.softplus(a + dt_bias)
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return Canonical(q, k, v, g, 2 * torch.sigmoid(b), q.shape[-1] ** -0.5, state)


SPELLINGS = (
    Spelling("beta_folded", beta_folded),
    Spelling("erase_then_write", erase_then_write),
    Spelling("transition_matrix", transition_matrix),
    Spelling("read_before_decay", read_before_decay),
    Spelling("negative_error", negative_error, state="VK"),
    Spelling("output_from_parts", output_from_parts),
    Spelling("in_place_state", in_place_state, grads=False),
    Spelling("repeat_before", repeat_before, grouped=True),
    Spelling("repeat_in_step", repeat_in_step, grouped=True),
    Spelling("expand_before", expand_before, grouped=True),
    Spelling("normalised_in_step", normalised_in_step, normalised=True),
    Spelling("beta_on_value", beta_on_value, encode=_on_value, decode=_on_value_back),
    Spelling("raw_gates", raw_gates, encode=_raw, decode=_raw_back),
)
