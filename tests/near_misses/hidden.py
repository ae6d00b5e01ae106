"""Steps that agree with Gated DeltaNet on ordinary random data, or in value but not in gradient.

A comparison on random numbers alone does not see these; something has to look at the operations.
"""

from __future__ import annotations

import torch

from near_misses.near_miss import NearMiss

NONLINEAR = frozenset({"QLA202", "QLA203", "QLA204", "QLA206", "QLA207", "QLA208"})
GRADIENT = NONLINEAR | {"QLA304"}


def _zeros(q, v):
    return q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])


def _read(S, x):
    return (S * x[..., None]).sum(-2)


def clipped_error(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = (beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))).clamp(-50, 50)
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def clipped_state(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = torch.clamp(S + k[:, t][..., None] * u[..., None, :], min=-50.0, max=50.0)
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def reset_when_large(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        S = torch.where(S.abs() > 60, torch.zeros_like(S), S)
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def saturating_output(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append((_read(S, q[:, t]) * q.shape[-1] ** -0.5).clamp(-20, 20))
    return torch.stack(outs, 1), S


def detached_read(q, k, v, g, beta):
    """The error does not send a gradient into the state."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]).detach())
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def detached_state(q, k, v, g, beta):
    """Backpropagation through time stops at every token."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S.detach() * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def no_grad_decay(q, k, v, g, beta):
    """The gate learns nothing: the decay is computed without gradient."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        with torch.no_grad():
            decay = g[:, t].exp()[..., None, None]
        S = S * decay
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


HIDDEN = (
    NearMiss("clipped_error", clipped_error, "the error is not clipped", NONLINEAR, scale_v=200.0),
    NearMiss("clipped_state", clipped_state, "the state is not clipped", NONLINEAR, scale_v=200.0),
    NearMiss("reset_when_large", reset_when_large, "the state is not reset", NONLINEAR, scale_v=200.0),
    NearMiss("saturating_output", saturating_output, "the output is the read itself", NONLINEAR, scale_v=200.0),
    NearMiss("detached_read", detached_read, "gradients flow through the error", GRADIENT, same_value=True),
    NearMiss("detached_state", detached_state, "gradients flow through the state", GRADIENT, same_value=True),
    NearMiss("no_grad_decay", no_grad_decay, "gradients reach the gate", GRADIENT | {"QLA105"}, same_value=True),
)  # fmt: skip
