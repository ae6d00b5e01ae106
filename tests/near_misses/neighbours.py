"""The families next to Gated DeltaNet, and steps that differ from it in one place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.near_miss import NearMiss

UPDATE = frozenset({"QLA202", "QLA203", "QLA205", "QLA206", "QLA207"})
OUTPUT = UPDATE | {"QLA204"}
STATES = UPDATE | {"QLA201"}


def _zeros(q, v):
    return q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])


def _read(S, x):
    return (S * x[..., None]).sum(-2)


def comba(q, k, v, g, beta, p):
    """Reads the error with a key of its own."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, p[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def comba_scaled(q, k, v, g, beta, decay):
    """The same family where the read key is the write key times a number per head."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t] * decay.sigmoid()[:, None]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def kda(q, k, v, g, beta, channel):
    """Decays each key channel at a rate of its own."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * (g[:, t][..., None] * channel[:, t]).exp()[..., None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def value_channel_decay(q, k, v, g, beta, channel):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * (g[:, t][..., None] * channel[:, t]).exp()[..., None, :]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def delta_product(q, k, v, g, beta, k2, v2, beta2):
    """Two delta writes for one decay and one read."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        S = S + k[:, t][..., None] * (beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t])))[..., None, :]
        S = S + k2[:, t][..., None] * (beta2[:, t][..., None] * (v2[:, t] - _read(S, k2[:, t])))[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def preconditioned(q, k, v, g, beta):
    """A second, diagonal state gathers squared keys and rescales the key that writes."""
    S, outs = _zeros(q, v), []
    A = torch.ones_like(k[:, 0])
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None]
        A = A * decay + beta[:, t][..., None] * k[:, t] ** 2
        S = S * decay[..., None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + (k[:, t] / (A.sqrt() + 1e-6))[..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def gdn2(q, k, v, g, beta, erase, write):
    """Erases by key channel and writes by value channel."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = write[:, t] * v[:, t] - _read(S, erase[:, t] * k[:, t])
        S = S + k[:, t][..., None] * (beta[:, t][..., None] * u)[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def momentum(q, k, v, g, beta):
    """The write goes through a momentum state."""
    S, M, outs = _zeros(q, v), _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = v[:, t] - _read(S, k[:, t])
        M = 0.7 * M + k[:, t][..., None] * error[..., None, :]
        S = S + beta[:, t][..., None, None] * M
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def delta_rule(q, k, v, g, beta):
    """No gate at all: Gated DeltaNet with g = 0. A match is right here."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def gated_linear_attention(q, k, v, g, beta):
    """Mamba-2, RetNet, simple GLA: nothing is read before the write."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        S = S + k[:, t][..., None] * (beta[:, t][..., None] * v[:, t])[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def error_before_decay(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S * g[:, t].exp()[..., None, None] + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def read_before_write(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
    return torch.stack(outs, 1), S


def decay_after_write(q, k, v, g, beta):
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = (S + k[:, t][..., None] * u[..., None, :]) * g[:, t].exp()[..., None, None]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def beta_per_channel(q, k, v, g, beta, channel):
    """beta is a vector over the value channels."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * channel[:, t] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def heads_mixed(q, k, v, g, beta):
    """Keys are repeated in the other order, so a head reads with one key and writes with another."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t].flip(1)[..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def batch_mean_error(q, k, v, g, beta):
    """The rows of the batch see each other."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - _read(S, k[:, t]).mean(0, keepdim=True))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def previous_value(q, k, v, g, beta):
    """Writes the value of the token before."""
    S, outs = _zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t - 1] - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(_read(S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), S


def feedback(q, k, v, g, beta):
    """The last output goes back into the value: a recurrence through two things."""
    S, outs = _zeros(q, v), []
    o = torch.zeros_like(v[:, 0])
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] + o - _read(S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        o = _read(S, q[:, t]) * q.shape[-1] ** -0.5
        outs.append(o)
    return torch.stack(outs, 1), S


NEIGHBOURS = (
    NearMiss("comba", comba, "the key that reads is the key that writes", UPDATE, "comba",
             lambda c, randn: (F.normalize(c.k + 0.3 * randn(*c.k.shape), dim=-1),)),
    NearMiss("comba_scaled", comba_scaled, "the key that reads is the key that writes", UPDATE, "comba",
             lambda c, randn: (randn(c.k.shape[2]) - 2,)),
    NearMiss("kda", kda, "the decay is one number per head", UPDATE, "kda",
             lambda c, randn: (2 * randn(*c.k.shape).sigmoid(),)),
    NearMiss("value_channel_decay", value_channel_decay, "the decay is one number per head", UPDATE, None,
             lambda c, randn: (2 * randn(*c.v.shape).sigmoid(),)),
    NearMiss("delta_product", delta_product, "one write per token", UPDATE, "gated_delta_product",
             lambda c, randn: (F.normalize(randn(*c.k.shape), dim=-1), randn(*c.v.shape),
                               randn(*c.beta.shape).sigmoid())),
    NearMiss("preconditioned", preconditioned, "one matrix state", STATES, "preconditioned_gated_delta_rule"),
    NearMiss("gdn2", gdn2, "erase and write are one number per head", UPDATE, "gdn2",
             lambda c, randn: (randn(*c.k.shape).sigmoid(), randn(*c.v.shape).sigmoid())),
    NearMiss("momentum", momentum, "one matrix state", STATES, "momentum_delta_rule"),
    NearMiss("delta_rule", delta_rule, "a gate, which may be 1", frozenset(), "delta_rule", legal=True),
    NearMiss("gated_linear_attention", gated_linear_attention, "the write subtracts what the key reads", UPDATE,
             "gated_linear_attention"),
    NearMiss("error_before_decay", error_before_decay, "the error is taken from the decayed state", UPDATE),
    NearMiss("read_before_write", read_before_write, "the output reads the state after the write", OUTPUT),
    NearMiss("decay_after_write", decay_after_write, "the decay comes before the write", OUTPUT),
    NearMiss("beta_per_channel", beta_per_channel, "beta is one number per head", UPDATE, None,
             lambda c, randn: (randn(*c.v.shape).sigmoid(),)),
    NearMiss("heads_mixed", heads_mixed, "a head writes with its own key", UPDATE),
    NearMiss("batch_mean_error", batch_mean_error, "rows of the batch are independent", UPDATE),
    NearMiss("previous_value", previous_value, "every input is read at the loop index", UPDATE),
    NearMiss("feedback", feedback, "inputs do not depend on earlier outputs", STATES),
)  # fmt: skip
