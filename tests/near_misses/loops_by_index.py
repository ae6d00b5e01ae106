"""Loops whose iterations differ by what Python does with the index, or with a number that counts along."""

from __future__ import annotations

import torch

from near_misses.lookalike import LookAlike, read, write, zeros


def plain(q, k, v, g, beta):
    """The control: nothing is wrong here."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def at_one_index(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        if t == 20:
            S = S * 0
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def at_every_sixteenth(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        if t % 16 == 15:
            S = S * 0.5
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def truncated_gradient(q, k, v, g, beta):
    """Backpropagation through time stops at every eighth token; only gradients show it."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        if t % 8 == 0:
            S = S.detach()
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def index_capped(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, min(t, 10)], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def index_delayed(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, max(t - 1, 0)], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def index_wrapped(q, k, v, g, beta):
    """At t = 0 this reads the last value. Every iteration is the same, and it is not Gated DeltaNet."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t - 1], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def counter(q, k, v, g, beta):
    S, outs, c = zeros(q, v), [], 0
    for t in range(q.shape[1]):
        c += 1  # noqa: SIM113
        if c == 20:
            S = S * 0
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def stops_early(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        if t == 30:
            break
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def skips_one(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        if t == 17:
            continue
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def switches_late(q, k, v, g, beta):
    """The last ten tokens take another branch."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] if t < q.shape[1] - 10 else -v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def last_is_special(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    T = q.shape[1]
    for t in range(T):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]) if t < T - 1 else read(S, k[:, t]))
    return torch.stack(outs, 1), S


def float_carry(q, k, v, g, beta):
    """A Python number that shrinks with each token."""
    S, outs, weight = zeros(q, v), [], 1.0
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] * weight, g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        weight *= 0.97
    return torch.stack(outs, 1), S


def index_as_number(q, k, v, g, beta):
    """The index enters the arithmetic."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] / (t + 1), g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def alternating_string(q, k, v, g, beta):
    S, outs, mode = zeros(q, v), [], "even"
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] if mode == "even" else -v[:, t], g[:, t], beta[:, t])
        mode = "odd" if mode == "even" else "even"
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def enumerate_from_one(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for i, t in enumerate(range(q.shape[1]), start=1):
        S = write(S, k[:, i - 1], v[:, t], g[:, t], beta[:, i - 1])
        outs.append(read(S, q[:, i - 1]))
    return torch.stack(outs, 1), S


def backwards(q, k, v, g, beta):
    S, o = zeros(q, v), torch.zeros_like(v)
    for t in range(q.shape[1] - 1, -1, -1):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o[:, t] = read(S, q[:, t])
    return o, S


def every_second(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(0, q.shape[1], 2):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def starts_at_three(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(3, q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def while_true(q, k, v, g, beta):
    S, outs, t = zeros(q, v), [], 0
    while True:
        if t >= q.shape[1]:
            break
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        t += 1
    return torch.stack(outs, 1), S


def index_used_after(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    S = S * 2
    return torch.stack(outs, 1), S * t


def falls_back(q, k, v, g, beta):
    """A table shorter than the sequence; past its end an exception chooses another value."""
    S, outs, table = zeros(q, v), [], [0.5] * 20
    for t in range(q.shape[1]):
        try:
            weight = table[t]
        except IndexError:
            weight = 1.0
        S = write(S, k[:, t], v[:, t] * weight, g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def snapshot(q, k, v, g, beta):
    """Keeps the state of one token."""
    S, outs, kept = zeros(q, v), [], None
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        if t == 10:
            kept = S
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S, kept


BY_INDEX = (
    LookAlike("plain", plain, True, gdn=True),
    LookAlike("at_one_index", at_one_index, False),
    LookAlike("at_every_sixteenth", at_every_sixteenth, False),
    LookAlike("truncated_gradient", truncated_gradient, False),
    LookAlike("index_capped", index_capped, False),
    LookAlike("index_delayed", index_delayed, None),
    LookAlike("index_wrapped", index_wrapped, None),
    LookAlike("counter", counter, False),
    LookAlike("stops_early", stops_early, False),
    LookAlike("skips_one", skips_one, False),
    LookAlike("switches_late", switches_late, False),
    LookAlike("last_is_special", last_is_special, False),
    LookAlike("float_carry", float_carry, False),
    LookAlike("index_as_number", index_as_number, None),
    LookAlike("alternating_string", alternating_string, False),
    LookAlike("enumerate_from_one", enumerate_from_one, None, gdn=True),
    LookAlike("backwards", backwards, None),
    LookAlike("every_second", every_second, None, gdn=True),
    LookAlike("starts_at_three", starts_at_three, None, gdn=True),
    LookAlike("while_true", while_true, None, gdn=True),
    LookAlike("index_used_after", index_used_after, None, gdn=True),
    LookAlike("falls_back", falls_back, False),
    LookAlike("snapshot", snapshot, False),
)
