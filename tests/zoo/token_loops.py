"""Token loops as people write them: one choice of form after another. All are Gated DeltaNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zoo.spelling import Spelling


def list_stack(q, k, v, g, beta):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        read = (S * k[:, t, :, :, None]).sum(-2)
        u = (v[:, t] - read) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        outs.append((S * (q[:, t] * K**-0.5)[..., None]).sum(-2))
    return torch.stack(outs, dim=1), S


def list_cat(q, k, v, g, beta):
    q = q / q.shape[-1] ** 0.5
    h = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype, device=q.device)
    pieces = []
    for i in range(q.size(1)):
        qi, ki, vi = q[:, i], k[:, i], v[:, i]
        h = torch.exp(g[:, i]).unsqueeze(-1).unsqueeze(-1) * h
        delta = beta[:, i].unsqueeze(-1) * (vi - torch.einsum("bhd,bhdm->bhm", ki, h))
        h = h + torch.einsum("bhd,bhm->bhdm", ki, delta)
        pieces.append(torch.einsum("bhd,bhdm->bhm", qi, h).unsqueeze(1))
    return torch.cat(pieces, dim=1), h


def preallocated(q, k, v, g, beta):
    scale = 1 / (q.shape[-1] ** 0.5)
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]).to(v)
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        q_t, k_t, v_t = q[:, t] * scale, k[:, t], v[:, t]
        state = state * g[:, t, :, None, None].exp()
        kv_mem = (state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - kv_mem) * beta[:, t].unsqueeze(-1)
        state = state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        o[:, t] = (state * q_t.unsqueeze(-1)).sum(dim=-2)
    return o, state


def value_key_state(q, k, v, g, beta):
    """Paper notation: the state maps keys to values, S [V,K], and is read as S k."""
    B, T, H, K = k.shape
    V = v.shape[-1]
    S = k.new_zeros(B, H, V, K)
    ys = []
    for t in range(T):
        alpha = g[:, t].exp().view(B, H, 1, 1)
        S = alpha * S
        err = v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhv,bhk->bhvk", beta[:, t].unsqueeze(-1) * err, k[:, t])
        ys.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t] * (K**-0.5)))
    return torch.stack(ys, 1), S


def linear_gate(q, k, v, alpha, beta):
    """The decay itself is passed, not its logarithm; nothing is scaled."""
    B, T, H, K = q.shape
    M = torch.zeros(B, H, K, v.size(-1), dtype=v.dtype)
    res = []
    for t in range(T):
        M = alpha[:, t][:, :, None, None] * M
        pred = torch.einsum("bhkv,bhk->bhv", M, k[:, t])
        M = M + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][:, :, None] * (v[:, t] - pred))
        res.append(torch.einsum("bhkv,bhk->bhv", M, q[:, t]))
    return torch.stack(res, 1), M


def no_gate(q, k, v, beta):
    """The delta rule without decay: Gated DeltaNet with g = 0."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    out = torch.empty_like(v)
    for t in range(T):
        old = (k[:, t].unsqueeze(-2) @ S).squeeze(-2)
        new = beta[:, t, :, None] * (v[:, t] - old)
        S = S + k[:, t].unsqueeze(-1) @ new.unsqueeze(-2)
        out[:, t] = ((q[:, t] * K**-0.5).unsqueeze(-2) @ S).squeeze(-2)
    return out, S


def no_beta(q, k, v, g):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        S = S + k[:, t, ..., None] * (v[:, t] - (S * k[:, t, ..., None]).sum(2))[:, :, None]
        outs.append((S * q[:, t, ..., None]).sum(2) * K**-0.5)
    return torch.stack(outs, 1), S


def scale_on_output(q, k, v, g, beta):
    """Scales the whole output once, after the loop, and returns no state."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    o = v.new_zeros(B, T, H, v.shape[-1])
    for t in range(T):
        decay = torch.exp(g[:, t])
        S = S * decay[:, :, None, None]
        u = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t][..., None] * u[..., None, :]
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o * K**-0.5


def scale_in_step(q, k, v, g, beta):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t in range(T):
        S = g[:, t].exp()[..., None, None].mul(S)
        u = beta[:, t].unsqueeze(-1).mul(v[:, t].sub(S.mul(k[:, t].unsqueeze(-1)).sum(dim=-2)))
        S = S.add(k[:, t].unsqueeze(-1).mul(u.unsqueeze(-2)))
        o = S.mul(q[:, t].unsqueeze(-1)).sum(dim=-2)
        outs.append(o.div(K**0.5))
    return torch.stack(outs, dim=1), S


def matmul(q, k, v, g, beta):
    B, T, H, K = q.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype)
    outs = []
    for t in range(T):
        row = k[:, t].unsqueeze(-2)
        S = torch.exp(g[:, t]).view(B, H, 1, 1) * S
        u = beta[:, t].view(B, H, 1, 1) * (v[:, t].unsqueeze(-2) - torch.matmul(row, S))
        S = S + torch.matmul(row.transpose(-1, -2), u)
        outs.append(torch.matmul(q[:, t].unsqueeze(-2) * K**-0.5, S).squeeze(-2))
    return torch.stack(outs, 1), S


def head_first(q, k, v, g, beta):
    """[B,H,T,D], as the code that descends from transformers has it after its transposes."""
    B, H, T, K = k.shape
    o = torch.zeros(B, H, T, v.shape[-1], dtype=v.dtype)
    S = torch.zeros(B, H, K, v.shape[-1], dtype=v.dtype)
    q = q * (1 / K**0.5)
    for i in range(T):
        S = S * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        mem = (S * k[:, :, i].unsqueeze(-1)).sum(dim=-2)
        d = (v[:, :, i] - mem) * beta[:, :, i].unsqueeze(-1)
        S = S + k[:, :, i].unsqueeze(-1) * d.unsqueeze(-2)
        o[:, :, i] = (S * q[:, :, i].unsqueeze(-1)).sum(dim=-2)
    return o, S


def fused_adds(q, k, v, g, beta):
    """Batch and heads flattened; the write is one baddbmm and the error one addcmul."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    qf, kf, vf = (x.transpose(1, 2).reshape(B * H, T, -1) for x in (q, k, v))
    gf, bf = (x.transpose(1, 2).reshape(B * H, T, 1, 1) for x in (g, beta))
    S = q.new_zeros(B * H, K, V)
    outs = []
    for t in range(T):
        S = S * gf[:, t].exp()
        read = torch.bmm(kf[:, t : t + 1], S)
        u = torch.addcmul(bf[:, t] * vf[:, t : t + 1], bf[:, t], read, value=-1)
        S = torch.baddbmm(S, kf[:, t, :, None], u)
        outs.append(torch.bmm(qf[:, t : t + 1], S) * K**-0.5)
    o = torch.cat(outs, dim=1).view(B, H, T, V).transpose(1, 2)
    return o, S.view(B, H, K, V)


def _step(S, q_t, k_t, v_t, g_t, b_t):
    S = S * g_t.exp()[..., None, None]
    u = (v_t - torch.einsum("...kv,...k->...v", S, k_t)) * b_t[..., None]
    S = S + torch.einsum("...k,...v->...kv", k_t, u)
    return S, torch.einsum("...kv,...k->...v", S, q_t)


def step_function(q, k, v, g, beta):
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        S, o_t = _step(S, q[:, t] * q.shape[-1] ** -0.5, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o_t)
    return torch.stack(outs, dim=1), S


class Cell(torch.nn.Module):
    """A recurrent cell in the manner of LSTMCell: the state goes in and comes out."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x, state):
        q, k, v, g, beta = x
        state = state * g.exp()[..., None, None]
        error = v - (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
        return (state * q[..., None]).sum(-2) * self.scale, state


def cell_class(q, k, v, g, beta):
    cell = Cell(q.shape[-1] ** -0.5)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        out, state = cell((q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t]), state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


def single_head(q, k, v, g, beta):
    """No batch, no heads: matrix-vector products and outer products, state [V,K]."""
    T, K = q.shape
    S = torch.zeros(v.shape[-1], K, dtype=q.dtype)
    o = []
    for t in range(T):
        S = g[t].exp() * S
        S = S + beta[t] * torch.outer(v[t] - S @ k[t], k[t])
        o.append(torch.mv(S, q[t]))
    return torch.stack(o), S


def no_batch(q, k, v, g, beta):
    """[T,H,D], as inference code has one sequence."""
    T, H, K = q.shape
    S = q.new_zeros(H, K, v.shape[-1])
    o = torch.zeros_like(v)
    for t in range(T):
        S = S * torch.exp(g[t])[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.bmm(k[t][:, None], S)[:, 0])
        S = S + torch.bmm(k[t][:, :, None], u[:, None])
        o[t] = torch.bmm(q[t][:, None] * K**-0.5, S)[:, 0]
    return o, S


def initial_state(q, k, v, g, beta, state):
    S = state
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)) * beta[:, t][..., None]
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, S))
    return torch.stack(outs, 1), S


def time_first(q, k, v, g, beta):
    """[T,B,H,D], as code that grew out of torch.nn.RNN has it."""
    T, B, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    o = torch.empty(T, B, H, v.shape[-1], dtype=v.dtype)
    for t in range(T):
        S = S * g[t].exp()[..., None, None]
        S = S + k[t][..., None] * ((v[t] - (S * k[t][..., None]).sum(-2)) * beta[t][..., None])[..., None, :]
        o[t] = (S * q[t][..., None]).sum(-2) / K**0.5
    return o, S


def normalised_inside(q, k, v, g, beta):
    q, k = F.normalize(q, p=2, dim=-1), F.normalize(k, p=2, dim=-1)
    return preallocated(q, k, v, g, beta)


SPELLINGS = (
    Spelling("list_stack", list_stack),
    Spelling("list_cat", list_cat),
    Spelling("preallocated", preallocated),
    Spelling("value_key_state", value_key_state, state="VK"),
    Spelling("linear_gate", linear_gate, gate="linear", scaled=False),
    Spelling("no_gate", no_gate, gate="none"),
    Spelling("no_beta", no_beta, beta=False),
    Spelling("scale_on_output", scale_on_output, final=False),
    Spelling("scale_in_step", scale_in_step),
    Spelling("matmul", matmul),
    Spelling("head_first", head_first, layout="BHTD"),
    Spelling("fused_adds", fused_adds),
    Spelling("step_function", step_function),
    Spelling("cell_class", cell_class),
    Spelling("single_head", single_head, layout="TD", state="VK", scaled=False),
    Spelling("no_batch", no_batch, layout="THD"),
    Spelling("initial_state", initial_state, initial=True),
    Spelling("time_first", time_first, layout="TBHD"),
    Spelling("normalised_inside", normalised_inside, normalised=True),
)
