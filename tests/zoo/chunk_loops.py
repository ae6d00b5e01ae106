"""Chunked Gated DeltaNet, written from the maths in the ways that people solve the triangular system.

Within a chunk, with G the running sum of the log decay, the errors U that all its tokens write satisfy
``(I + A) U = diag(beta) (V - diag(e^G) K S)``, where ``A_ij = beta_i e^(G_i - G_j) k_i.k_j`` for j < i; then
``O = diag(e^G) Q S + tril(Q K^T e^(G_i - G_j)) U`` and ``S' = e^(G_C) S + K^T diag(e^(G_C - G)) U``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zoo.spelling import Spelling

CHUNK = 16


def _chunks(x, pad):
    """[B,T,H,...] to [B,H,N,C,...], zeros at the end: k = v = beta = g = 0 leaves the state as it is."""
    x = x.transpose(1, 2)
    x = F.pad(x, (0, 0, 0, pad) if x.dim() == 4 else (0, pad))
    return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])


def row_loop(q, k, v, g, beta):
    """The inverse by rows, for all chunks at once; then a loop over chunks. Masks before and after the exp."""
    B, T, H, K = q.shape
    pad = (CHUNK - T % CHUNK) % CHUNK
    q, k, v, g, beta = (_chunks(x, pad) for x in (q * K**-0.5, k, v, g, beta))
    vb, kb = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    G = g.cumsum(-1)
    decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).tril().exp().tril()
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(0)
    inverse = -((kb @ k.transpose(-1, -2)) * decay).masked_fill(upper, 0)
    for i in range(1, CHUNK):
        row = inverse[..., i, :i].clone()
        above = inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    inverse = inverse + torch.eye(CHUNK, dtype=q.dtype)
    values = inverse @ vb
    keys = inverse @ (kb * G.exp().unsqueeze(-1))
    S = q.new_zeros(B, H, K, v.shape[-1])
    o = torch.zeros_like(v)
    strict = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    for n in range(q.shape[2]):
        qn, kn, Gn = q[:, :, n], k[:, :, n], G[:, :, n]
        scores = (qn @ kn.transpose(-1, -2) * decay[:, :, n]).masked_fill(strict, 0)
        u = values[:, :, n] - keys[:, :, n] @ S
        o[:, :, n] = (qn * Gn[..., None].exp()) @ S + scores @ u
        last = Gn[..., -1, None]
        S = S * last[..., None].exp() + (kn * (last - Gn).exp()[..., None]).transpose(-1, -2) @ u
    return o.reshape(B, H, -1, v.shape[-1])[:, :, :T].transpose(1, 2), S


def _solve_chunks(q, k, v, g, beta, solve):
    B, T, H, K = q.shape
    pad = (CHUNK - T % CHUNK) % CHUNK
    q, k, v, g, beta = (_chunks(x, pad) for x in (q, k, v, g, beta))
    S = q.new_zeros(B, H, K, v.shape[-1])
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    outs = []
    for qc, kc, vc, gc, bc in zip(*(x.unbind(2) for x in (q, k, v, g, beta))):
        G = gc.cumsum(-1)
        ratio = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, float("-inf")).exp()
        A = (bc[..., None] * (kc @ kc.mT) * ratio).tril(-1)
        rhs = bc[..., None] * (vc - G.exp()[..., None] * (kc @ S))
        u = solve(A, rhs)
        outs.append(K**-0.5 * (G.exp()[..., None] * (qc @ S) + (qc @ kc.mT * ratio) @ u))
        S = G[..., -1, None, None].exp() * S + (kc * (G[..., -1:] - G).exp()[..., None]).mT @ u
    return torch.cat(outs, dim=2)[:, :, :T].transpose(1, 2), S


def linalg_solve(q, k, v, g, beta):
    return _solve_chunks(q, k, v, g, beta, lambda A, rhs: torch.linalg.solve(torch.eye(CHUNK, dtype=A.dtype) + A, rhs))


def inverse(q, k, v, g, beta):
    return _solve_chunks(q, k, v, g, beta, lambda A, rhs: torch.inverse(torch.eye(CHUNK, dtype=A.dtype) + A) @ rhs)


def solve_triangular(q, k, v, g, beta):
    def solve(A, rhs):
        return torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)

    return _solve_chunks(q, k, v, g, beta, solve)


def forward_substitution(q, k, v, g, beta):
    """Solves for one token's error after the other, from those before it."""

    def solve(A, rhs):
        rows = [rhs[..., 0, :]]
        for i in range(1, CHUNK):
            before = torch.stack(rows, dim=-2)
            rows.append(rhs[..., i, :] - (A[..., i, :i, None] * before).sum(-2))
        return torch.stack(rows, dim=-2)

    return _solve_chunks(q, k, v, g, beta, solve)


def tokens_in_chunks(q, k, v, g, beta):
    """Chunks only for memory's sake: a token loop inside a chunk loop."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    pieces = []
    for start in range(0, T, CHUNK):
        outs = []
        for t in range(start, min(start + CHUNK, T)):
            S = S * g[:, t].exp()[..., None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
        pieces.append(torch.stack(outs, 1))
    return torch.cat(pieces, 1), S


SPELLINGS = (
    Spelling("chunk_row_loop", row_loop),
    Spelling("chunk_linalg_solve", linalg_solve),
    Spelling("chunk_inverse", inverse),
    Spelling("chunk_solve_triangular", solve_triangular),
    Spelling("chunk_forward_substitution", forward_substitution),
    Spelling("chunk_tokens", tokens_in_chunks, must_match=False),
)
