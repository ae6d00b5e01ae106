"""Functions that are the identity near zero, roundings, masks, and numbers that the compiler may not treat as real."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attacks.attack import Attack, changed, in_step, inputs, linear_gate, loop, noise
from near_misses.lookalike import read, write, zeros

large = changed(v=lambda x: x * 100, g=lambda x: x * 20)
large_k = changed(k=lambda x: x * torch.tensor([1.0, 3.3, 2.0])[:, None])
large_v = changed(v=lambda x: x * 300)


def clipped_keys(k):
    n = k.norm(dim=-1, keepdim=True)
    return torch.where(n > 3, k / n, k)


def clipped_norm(v):
    return v * (10 / v.norm(dim=-1, keepdim=True)).clamp(max=1)


def clipped_error(q, k, v, g, beta):
    """min(u, 50), spelled with the square root of a square."""
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None]).sum(-2))
        u = (u + 50 - ((u - 50) ** 2).sqrt()) / 2
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def one_infinite_value():
    q, k, v, g, beta = inputs()
    v[:, 3] = float("inf")
    return q, k, v, g, beta


PIECEWISE = [
    Attack("clamp_of_v", in_step(v=lambda x: x.clamp(-10, 10)), large),
    Attack("clamp_of_g_from_below", in_step(g=lambda x: x.clamp(min=-5)), large),
    Attack("clamp_min_of_g", in_step(g=lambda x: torch.clamp_min(x, -3.0)), large),
    Attack("maximum_of_g", in_step(g=lambda x: torch.maximum(x, torch.full((), -3.0))), large),
    Attack("hardtanh_of_v", in_step(v=lambda x: F.hardtanh(x, -7, 7)), large),
    Attack("threshold_of_v", in_step(v=lambda x: F.threshold(x, -30, -30)), large),
    Attack("clamp_of_the_output", in_step(out=lambda x: x.clamp(-10, 10)), large),
    Attack("nan_to_num_of_v", in_step(v=lambda x: torch.nan_to_num(x, posinf=7.0)), one_infinite_value),
    Attack("where_of_large_v", in_step(v=lambda x: torch.where(x.abs() > 1.2, x * 0, x)), inputs),
    Attack("clipped_norm_of_k", in_step(k=clipped_keys), large_k),
    Attack("clipped_norm_of_v", in_step(v=clipped_norm), large),
    Attack("clipped_error", clipped_error, large_v),
    Attack("state_modulo_100_by_int64", in_step(state=lambda S: S - (S / 100).to(torch.int64) * 100), large_v),
    Attack("state_modulo_100_by_long", in_step(state=lambda S: S - (S / 100).long() * 100), large_v),
]


def masked(dtype=torch.float32):
    m = torch.ones(2, 12)
    m[0, 5:8] = m[1, 9:] = 0
    return (*inputs(), m.to(dtype))


def positions():
    return (*inputs(), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]] * 2))


def padding_keeps_the_state(q, k, v, g, beta, m):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        new = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        S = torch.where(m[:, t].bool()[:, None, None, None], new, S)
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def beta_where_not_padded(q, k, v, g, beta, m):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        b = beta[:, t].masked_fill(m[:, t, None] == 0, 0.0)
        S = write(S, k[:, t], v[:, t], g[:, t], b)
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def reset_where_position_is_zero(q, k, v, g, beta, p):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = torch.where((p[:, t] == 0)[:, None, None, None], torch.zeros_like(S), S)
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def reset_by_a_product(q, k, v, g, beta, p):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * (p[:, t] != 0).to(S.dtype)[:, None, None, None]
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def kept(x):
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.3


MASKS = [
    Attack("float_mask_as_bool", padding_keeps_the_state, masked),
    Attack("bool_mask", padding_keeps_the_state, lambda: masked(torch.bool)),
    Attack("masked_fill_of_beta", beta_where_not_padded, masked),
    Attack("reset_where_position_is_zero", reset_where_position_is_zero, positions),
    Attack("reset_by_a_product_with_a_position", reset_by_a_product, positions),
    Attack("linear_gate_with_zeros", linear_gate, changed(g=lambda x: x.exp() * kept(x))),
    Attack("linear_gate_with_negative_values", linear_gate, changed(g=lambda x: x.exp() * noise(*x.shape))),
    Attack("gate_of_minus_infinity", loop, changed(g=lambda x: x.where(kept(x), torch.tensor(float("-inf"))))),
    Attack("bool_beta", loop, changed(beta=lambda x: x > 0.4)),
    Attack("int64_beta", loop, changed(beta=lambda x: (x > 0.4).long())),
    Attack("int64_g", loop, changed(g=lambda x: -(x < -0.5).long())),
]


def rounded(x):
    return x.bfloat16().float()


def doubles_in_the_step(q, k, v, g, beta):
    S, outs = zeros(q, v).double(), []
    for t in range(q.shape[1]):
        S = write(S, *(x[:, t].double() for x in (k, v, g, beta)))
        outs.append(read(S, q[:, t].double()))
    return torch.stack(outs, 1), S


def double_state(q, k, v, g, beta):
    return loop(q, k, v, g, beta, zeros(q, v).double())


def scaled_in_bf16(q, k, v, g, beta):
    return loop((q.bfloat16() * 0.3).float(), k, v, g, beta)


def one_minus(q, k, v, a, beta):
    """The decay is 1 - a, which is zero to rounding: its gradient is not."""
    return linear_gate(q, k, v, 1 - a, beta)


DTYPES = [
    Attack("float64_in_the_step", doubles_in_the_step, inputs, bound=1e-9),
    Attack("float64_state_only", double_state, inputs, bound=1e-9),
    Attack("v_through_bf16_in_the_step", in_step(v=rounded), inputs),
    Attack("g_through_bf16_in_the_step", in_step(g=rounded), inputs),
    Attack("q_through_bf16_in_the_step", in_step(q=rounded), inputs),
    Attack("output_through_bf16_in_the_step", in_step(out=rounded), inputs),
    Attack("q_scaled_in_bf16", scaled_in_bf16, inputs),
    Attack("exponential_of_a_bf16_gate", loop, changed(g=lambda x: x.bfloat16())),
    Attack("decay_that_rounds_to_zero", one_minus, changed(g=lambda x: 1 + 1e-38 * x)),
]

NUMBERS = [*PIECEWISE, *MASKS, *DTYPES]
