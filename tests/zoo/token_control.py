"""Token loops whose Python is unusual: not ``for t in range(T)`` over one sequence.

The recurrence is Gated DeltaNet in each. Those with ``must_match=False`` may be refused; then the reason must be told.
"""

from __future__ import annotations

import torch

from zoo.spelling import Spelling


def zip_unbind(q, k, v, g, beta):
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for qt, kt, vt, gt, bt in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), beta.unbind(1)):
        S = S * gt.exp()[..., None, None]
        u = (vt - (S * kt[..., None]).sum(-2)) * bt[..., None]
        S = S + kt[..., None] * u[..., None, :]
        outs.append((S * qt[..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def while_loop(q, k, v, g, beta):
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    t = 0
    while t < q.shape[1]:
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t][..., None]).sum(-2)) * beta[:, t][..., None]
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append((S * q[:, t][..., None]).sum(-2) * q.shape[-1] ** -0.5)
        t += 1
    return torch.stack(outs, 1), S


def stateful_cell(q, k, v, g, beta):
    """The state is an attribute of an object."""
    cell = _StatefulCell(q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    outs = []
    for t in range(q.shape[1]):
        outs.append(cell.step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t]))
    return torch.stack(outs, 1), cell.S


class _StatefulCell:
    def __init__(self, S):
        self.S = S

    def step(self, q, k, v, g, b):
        self.S = self.S * g.exp()[..., None, None]
        u = (v - (self.S * k[..., None]).sum(-2)) * b[..., None]
        self.S = self.S + k[..., None] * u[..., None, :]
        return (self.S * q[..., None]).sum(-2) * q.shape[-1] ** -0.5


def head_loop(q, k, v, g, beta):
    """A loop over heads around the loop over tokens; each head has a matrix of its own."""
    B, T, H, K = q.shape
    o = torch.zeros_like(v)
    states = []
    for h in range(H):
        S = q.new_zeros(B, K, v.shape[-1])
        for t in range(T):
            S = S * g[:, t, h].exp()[:, None, None]
            u = beta[:, t, h, None] * (v[:, t, h] - (S * k[:, t, h, :, None]).sum(1))
            S = S + k[:, t, h, :, None] * u[:, None]
            o[:, t, h] = (S * q[:, t, h, :, None]).sum(1) * K**-0.5
        states.append(S)
    return o, torch.stack(states, 1)


def two_halves(q, k, v, g, beta):
    """Two loops, one after the other, that hand the state on."""
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    half = q.shape[1] // 2
    outs = []
    for t in range(half):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t][..., None]).sum(-2)) * beta[:, t][..., None]
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append((S * q[:, t][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    for t in range(half, q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * k[:, t][..., None]).sum(-2)) * beta[:, t][..., None]
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append((S * q[:, t][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def enumerate_tokens(q, k, v, g, beta):
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    o = torch.zeros_like(v)
    for t, kt in enumerate(k.transpose(0, 1)):
        S = S * g[:, t].exp()[..., None, None]
        u = (v[:, t] - (S * kt[..., None]).sum(-2)) * beta[:, t][..., None]
        S = S + kt[..., None] * u[..., None, :]
        o[:, t] = (S * q[:, t][..., None]).sum(-2) * q.shape[-1] ** -0.5
    return o, S


SPELLINGS = (
    Spelling("zip_unbind", zip_unbind),
    Spelling("while_loop", while_loop),
    Spelling("stateful_cell", stateful_cell),
    Spelling("head_loop", head_loop, must_match=False),
    Spelling("two_halves", two_halves, regions=2),
    Spelling("enumerate_tokens", enumerate_tokens),
)
