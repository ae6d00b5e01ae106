"""Loops that keep something besides the matrix state in containers, cells, generators or attributes."""

from __future__ import annotations

import torch

from near_misses.lookalike import LookAlike, read, write, zeros


def list_length(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        if len(outs) == 25:
            S = S * 2
    return torch.stack(outs, 1), S


def list_reread(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        S = S + 0.01 * outs[t // 2].sum() + 0.01 * outs[0].sum()
    return torch.stack(outs, 1), S


def dict_counts(q, k, v, g, beta):
    S, outs, seen = zeros(q, v), [], {"n": 0}
    for t in range(q.shape[1]):
        seen["n"] += 1
        if seen["n"] == 20:
            S = S * 0
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def dict_of_outputs(q, k, v, g, beta):
    S, outs = zeros(q, v), {}
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs[t] = read(S, q[:, t])
    return torch.stack(list(outs.values()), 1), S


def set_fills(q, k, v, g, beta):
    S, outs, seen = zeros(q, v), [], set()
    for t in range(q.shape[1]):
        seen.add(t // 7)
        if len(seen) == 3:
            S = S * 0.9
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def nonlocal_counter(q, k, v, g, beta):
    S, outs, n = zeros(q, v), [], 0

    def tick():
        nonlocal n
        n += 1
        return n == 20

    for t in range(q.shape[1]):
        if tick():
            S = S * 0
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def generator_consumed(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    weights = (1.0 if i < 20 else 0.5 for i in range(q.shape[1]))
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] * next(weights), g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def iterator_consumed(q, k, v, g, beta):
    """The values come from an iterator that has been advanced once before the loop."""
    S, outs, values = zeros(q, v), [], iter([*v.unbind(1), v[:, 0]])
    next(values)
    for t in range(q.shape[1]):
        S = write(S, k[:, t], next(values), g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


class Counting(torch.nn.Module):
    """Counts its own tokens in an attribute."""

    def __init__(self):
        super().__init__()
        self.tokens = 0

    def forward(self, q, k, v, g, beta):
        S, outs = zeros(q, v), []
        for t in range(q.shape[1]):
            self.tokens += 1
            if self.tokens == 20:
                S = S * 0
            S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1), S


def two_appends(q, k, v, g, beta):
    """One list takes two tensors a token."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        outs.append(read(S, k[:, t]))
    return torch.stack(outs, 1), S


def two_lists_swapped(q, k, v, g, beta):
    """Two lists change places with each token."""
    S, a, b = zeros(q, v), [], []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        a.append(read(S, q[:, t]))
        b.append(read(S, k[:, t]))
        a, b = b, a
    return torch.stack(a, 1), torch.stack(b, 1), S


def list_prepends(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.insert(0, read(S, q[:, t]))
    return torch.stack(outs, 1), S


def list_pops(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, k[:, t]))
        outs.pop()
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def sliding_window(q, k, v, g, beta):
    """The last four outputs are kept and summed: the list stops growing at the fifth token."""
    S, outs, window = zeros(q, v), [], []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        window.append(read(S, q[:, t]))
        if len(window) > 4:
            window.pop(0)
        outs.append(torch.stack(window).sum(0))
    return torch.stack(outs, 1), S


def state_in_list(q, k, v, g, beta):
    box, outs = [zeros(q, v)], []
    for t in range(q.shape[1]):
        box[0] = write(box[0], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(box[0], q[:, t]))
    return torch.stack(outs, 1), box[0]


def finally_clause(q, k, v, g, beta):
    S, outs, done = zeros(q, v), [], 0
    for t in range(q.shape[1]):
        try:
            S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        finally:
            done += 1
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S * done


WITH_CONTAINERS = (
    LookAlike("list_length", list_length, False),
    LookAlike("list_reread", list_reread, False),
    LookAlike("dict_counts", dict_counts, False),
    LookAlike("dict_of_outputs", dict_of_outputs, None, gdn=True),
    LookAlike("set_fills", set_fills, False),
    LookAlike("nonlocal_counter", nonlocal_counter, False),
    LookAlike("generator_consumed", generator_consumed, False),
    LookAlike("iterator_consumed", iterator_consumed, None),
    LookAlike("attribute_counter", Counting.forward, False, module=Counting),
    LookAlike("two_appends", two_appends, None, gdn=True),
    LookAlike("two_lists_swapped", two_lists_swapped, False),
    LookAlike("list_prepends", list_prepends, None, gdn=True),
    LookAlike("list_pops", list_pops, None, gdn=True),
    LookAlike("sliding_window", sliding_window, False),
    LookAlike("state_in_list", state_in_list, None, gdn=True),
    LookAlike("finally_clause", finally_clause, None, gdn=True),
)
