"""Loops with more tensors in flight than the matrix state: buffers written in place, modes, random numbers, carries."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.lookalike import LookAlike, read, write, zeros


class Buffered(torch.nn.Module):
    """Adds into a registered buffer, which outlives the call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, q, k, v, g, beta):
        S, outs = zeros(q, v), []
        for t in range(q.shape[1]):
            S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
            self.total.add_(beta[:, t].detach().sum(0).to(self.total.dtype))
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1), S, self.total.clone()


def dropout_inside(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], F.dropout(v[:, t], 0.2, training=True), g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def noise_inside(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] + 0.1 * torch.randn_like(v[:, t]), g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def grad_mode_once(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        with torch.set_grad_enabled(torch.is_grad_enabled() and t != 20):
            S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def autocast_once(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=t == 20):
            u = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S).to(v.dtype)
        S = g[:, t].exp()[..., None, None] * S + k[:, t][..., None] * (beta[:, t][..., None] * u)[..., None, :]
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def lag_two(q, k, v, g, beta):
    """The state before last leaks in: two variables, one carried into the other."""
    S, older, outs = zeros(q, v), zeros(q, v), []
    for t in range(q.shape[1]):
        S, older = write(S, k[:, t], v[:, t], g[:, t], beta[:, t]) + 0.1 * older, S
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def tuple_state(q, k, v, g, beta):
    """A normaliser travels with the state in a tuple, and divides the output."""
    state, outs = (zeros(q, v), torch.ones_like(k[:, 0])), []
    for t in range(q.shape[1]):
        S, z = state
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        z = z * g[:, t].exp()[..., None] + k[:, t].abs()
        state = (S, z)
        outs.append(read(S, q[:, t]) / z.sum(-1, keepdim=True))
    return torch.stack(outs, 1), state[0]


def overlapping_writes(q, k, v, g, beta):
    """Each token writes its own row and the next one, which the next token overwrites."""
    B, T, H, _ = q.shape
    S, o = zeros(q, v), v.new_zeros(B, T + 1, H, v.shape[-1])
    for t in range(T):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o[:, t : t + 2] = read(S, q[:, t])[:, None]
    return o, S


def output_read_back(q, k, v, g, beta):
    S, o = zeros(q, v), torch.zeros_like(v)
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] + 0.5 * o[:, t - 1], g[:, t], beta[:, t])
        o[:, t] = read(S, q[:, t])
    return o, S


def one_row_for_all(q, k, v, g, beta):
    """The buffer is written at the same place by every token."""
    S, o = zeros(q, v), torch.zeros_like(v)
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o[:, 0] = read(S, q[:, t])
    return o, S


def key_in_place(q, k, v, g, beta):
    """Scales the caller's own keys, row by row."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        k[:, t].mul_(0.9)
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def next_key_in_place(q, k, v, g, beta):
    """Each token changes the key that the next one reads."""
    S, outs = zeros(q, v), []
    k = k.clone()
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        k[:, min(t + 1, q.shape[1] - 1)] += 0.1 * k[:, t]
    return torch.stack(outs, 1), S


def all_states(q, k, v, g, beta):
    """Returns the state after every token."""
    S, outs, states = zeros(q, v), [], []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
        states.append(S)
    return torch.stack(outs, 1), S, torch.stack(states, 1)


def aliased_state(q, k, v, g, beta):
    """The state buffer is changed in place while a second name looks at it."""
    S, outs = zeros(q, v), []
    alias = S[:, 0]
    for t in range(q.shape[1]):
        S.mul_(g[:, t].exp()[..., None, None])
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None]).sum(-2))
        S.add_(k[:, t][..., None] * u[..., None, :])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S, alias * 2


def appended_buffer(q, k, v, g, beta):
    """One buffer, changed in place, is appended each time: in the end all entries are the last output."""
    S, outs, o = zeros(q, v), [], torch.zeros_like(v[:, 0])
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o.copy_(read(S, q[:, t]))
        outs.append(o)
    return torch.stack(outs, 1), S


WITH_BUFFERS = (
    LookAlike("buffer_total", Buffered.forward, None, module=Buffered),
    LookAlike("dropout_inside", dropout_inside, None, random=True),
    LookAlike("noise_inside", noise_inside, None, random=True),
    LookAlike("grad_mode_once", grad_mode_once, False),
    LookAlike("autocast_once", autocast_once, False),
    LookAlike("lag_two", lag_two, None),
    LookAlike("tuple_state", tuple_state, None),
    LookAlike("overlapping_writes", overlapping_writes, None, gdn=True),
    LookAlike("output_read_back", output_read_back, None),
    LookAlike("one_row_for_all", one_row_for_all, None, gdn=True),
    LookAlike("key_in_place", key_in_place, None, mutates=True, grads=False),
    LookAlike("next_key_in_place", next_key_in_place, False, grads=False),
    LookAlike("all_states", all_states, None),
    LookAlike("aliased_state", aliased_state, None, gdn=True, grads=False),
    LookAlike("appended_buffer", appended_buffer, None, gdn=True),
)
