"""Programs that write in place: to temporaries, to inputs, to carried tensors and to parts of what they return."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attacks.attack import Attack, changed, chunked, in_step, inputs, loop, noise, with_state
from near_misses.lookalike import read, write, zeros


def on_a_copy(change):
    def fn(x):
        x = x.clone()
        change(x)
        return x

    return fn


def relu_in_place(x):
    x = x * 1.0
    F.relu(x, inplace=True)
    return x - 1


def first_head_zero(x):
    x = x.clone()
    x[:, 0] = 0
    return x


def packed_sum(x, g, beta):
    """q, k and v of a step are parts of a buffer that was filled in place."""
    S, outs = torch.zeros(2, 3, 4, 5), []
    for t in range(12):
        h = torch.zeros(2, 39)
        h.add_(x[:, t])
        q, k, v = h.view(2, 3, 13).split([4, 4, 5], -1)
        S = write(S, k, v, g[:, t], beta[:, t])
        outs.append(read(S, q))
    return torch.stack(outs, 1), S


IN_THE_STEP = [
    Attack("q_mul_in_step", in_step(q=on_a_copy(lambda x: x.mul_(0.5))), inputs),
    Attack("k_mul_in_step", in_step(k=on_a_copy(lambda x: x.mul_(0.5))), inputs),
    Attack("g_sub_in_step", in_step(g=on_a_copy(lambda x: x.sub_(0.5))), inputs),
    Attack("beta_mul_in_step", in_step(beta=on_a_copy(lambda x: x.mul_(1.5))), inputs),
    Attack("v_neg_in_step", in_step(v=on_a_copy(lambda x: x.neg_())), inputs),
    Attack("v_zero_in_step", in_step(v=on_a_copy(lambda x: x.zero_())), inputs),
    Attack("beta_of_first_head_zero_in_step", in_step(beta=first_head_zero), inputs),
    Attack("g_relu_in_step", in_step(g=relu_in_place), inputs),
    Attack("output_neg_in_step", in_step(out=on_a_copy(lambda x: x.neg_())), inputs),
    Attack("packed_operands_add_in_step", packed_sum, lambda: (noise(2, 12, 39), *inputs()[3:])),
]


def q_halved(q, k, v, g, beta, S):
    q = q.clone()
    q.mul_(0.5)
    return loop(q, k, v, g, beta, S)


def beta_zero_at_first(q, k, v, g, beta, S):
    beta = beta.clone()
    beta[:, :3] = 0
    return loop(q, k, v, g, beta, S)


def copy_halved_after_the_zeros(q, k, v, g, beta):
    k, S = k.clone(), zeros(q, v)
    k.mul_(0.5)
    return loop(q, k, v, g, beta, S)


def input_halved(q, k, v, g, beta):
    S = zeros(q, v)
    k.mul_(0.5)
    return *loop(q, k, v, g, beta, S), k * 1


def input_halved_after(q, k, v, g, beta):
    o, S = loop(q, k, v, g, beta)
    k.mul_(0.5)
    v.zero_()
    return o, S, k * 1


def chunked_with_k_halved(q, k, v, g, beta):
    k = k * 1.0
    k.mul_(0.5)
    return chunked(q, k, v, g, beta)


def chunked_with_state_halved(q, k, v, g, beta, S):
    S = S * 1.0
    S.mul_(0.5)
    k = k.clone()
    k[:, 3] = 0
    return chunked(q, k, v, g, beta, S)


def state_decays_in_place(q, k, v, g, beta, S0):
    """The first decay writes to S0, which is read after the loop."""
    S0 = S0.clone()
    S, outs = S0, []
    for t in range(q.shape[1]):
        S.mul_(g[:, t].exp()[..., None, None])
        u = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S.clone(), k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", S.clone(), q[:, t]))
    return torch.stack(outs, 1), S, S0 * 1


def argument_decays_in_place(q, k, v, g, beta, S0):
    S, outs = S0, []
    for t in range(q.shape[1]):
        S.mul_(g[:, t].exp()[..., None, None])
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None]).sum(-2))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S, S0.sum()


def cache_updated_in_the_loop(q, k, v, g, beta, S0):
    S, outs = S0[:], []
    for t in range(q.shape[1]):
        S.copy_(write(S, k[:, t], v[:, t], g[:, t], beta[:, t]))
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S0 * 1


def cache_updated_after(q, k, v, g, beta, S0):
    o, S = loop(q, k, v, g, beta, S0)
    S0.copy_(S)
    return o, S0 * 1


def first_row_of_the_state_is_one(q, k, v, g, beta):
    S = zeros(q, v)
    S[:, :, 0] = 1.0
    return loop(q, k, v, g, beta, S)


OUTSIDE = [
    Attack("q_halved_before", q_halved, with_state()),
    Attack("beta_zero_at_first", beta_zero_at_first, with_state()),
    Attack("copy_halved_after_the_zeros", copy_halved_after_the_zeros, inputs),
    Attack("input_halved", input_halved, inputs, grad=False),
    Attack("input_halved_after", input_halved_after, inputs, grad=False),
    Attack("chunked_with_k_halved", chunked_with_k_halved, lambda: inputs(T=32)),
    Attack("chunked_with_state_halved", chunked_with_state_halved, with_state(T=32)),
    Attack("initial_state_read_after_decay_in_place", state_decays_in_place, with_state()),
    Attack("argument_decays_in_place", argument_decays_in_place, with_state(), grad=False),
    Attack("cache_updated_in_the_loop", cache_updated_in_the_loop, with_state(), grad=False),
    Attack("cache_updated_after", cache_updated_after, with_state(), grad=False),
    Attack("first_row_of_the_state_is_one", first_row_of_the_state_is_one, inputs),
]


def writes(build, put):
    """The token loop that calls ``put(o, t, S, q_t, k_t, v_t)`` on the buffer that ``build(v)`` makes."""

    def fn(q, k, v, g, beta):
        S, o = zeros(q, v), build(v)
        for t in range(q.shape[1]):
            S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
            put(o, t, S, q[:, t], k[:, t], v[:, t])
        return o, S

    return fn


def twice(o, t, S, q, k, v):
    o[:, t] = read(S, q)
    o[:, t] = 3 * read(S, q)


def then_one_column(o, t, S, q, k, v):
    o[:, t] = read(S, q)
    o[:, t, 0] = v[:, 0]


def middle_columns(o, t, S, q, k, v):
    o[:, t, :, 2:7] = read(S, q)


def half_the_heads_each(o, t, S, q, k, v):
    o[:, t, :3] = read(S, q)
    o[:, t, 3:] = read(S, k)


def first_heads(o, t, S, q, k, v):
    o[:, t, :3] = read(S, q)


def all_of_it(o, t, S, q, k, v):
    o[:, t] = read(S, q)


def two_later(o, t, S, q, k, v):
    o[:, t + 2] = read(S, q)


def one_head_of_the_buffer(q, k, v, g, beta):
    S, o = q.new_zeros(2, 4, 5), torch.zeros_like(v)
    for t in range(q.shape[1]):
        S = write(S, k[:, t, 1], v[:, t, 1], g[:, t, 1], beta[:, t, 1])
        o[:, t, 1] = read(S, q[:, t, 1])
    return o, S


def buffer_scaled_after(q, k, v, g, beta):
    o, S = writes(torch.zeros_like, all_of_it)(q, k, v, g, beta)
    o.mul_(2)
    o[:, 0] = 0
    return o, S


def view_of_the_buffer_made_before(q, k, v, g, beta):
    S, o = zeros(q, v), torch.zeros_like(v)
    turned = o.transpose(1, 2)
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o[:, t] = read(S, q[:, t])
    return turned * 2, S


def last_output_scaled(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]))
    outs[-1].mul_(2)
    outs[3].add_(1)
    return torch.stack(outs, 1), S, outs[-1] * 1


def name_of_the_last_output_scaled(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        o = read(S, q[:, t])
        outs.append(o)
    o.mul_(2)
    return torch.stack(outs, 1), S


OUTPUTS = [
    Attack("buffer_written_twice", writes(torch.zeros_like, twice), inputs),
    Attack("buffer_written_twice_in_part", writes(torch.zeros_like, then_one_column), inputs),
    Attack("one_head_of_the_buffer", one_head_of_the_buffer, inputs),
    Attack("columns_of_the_buffer", writes(lambda v: torch.zeros(2, 12, 3, 9), middle_columns), inputs),
    Attack("heads_of_the_buffer", writes(lambda v: torch.ones(2, 12, 6, 5), first_heads), inputs),
    Attack("halves_of_the_buffer", writes(lambda v: torch.zeros(2, 12, 6, 5), half_the_heads_each), inputs),
    Attack("buffer_of_a_larger_batch", writes(lambda v: torch.zeros(4, 12, 3, 5), all_of_it), lambda: inputs(B=1)),
    Attack("buffer_of_more_steps", writes(lambda v: torch.ones(2, 15, 3, 5), two_later), inputs),
    Attack("buffer_of_float64", writes(lambda v: torch.zeros_like(v, dtype=torch.float64), all_of_it), inputs),
    Attack("buffer_scaled_after", buffer_scaled_after, inputs),
    Attack("view_of_the_buffer_made_before", view_of_the_buffer_made_before, inputs),
    Attack("last_output_scaled", last_output_scaled, inputs),
    Attack("name_of_the_last_output_scaled", name_of_the_last_output_scaled, inputs),
    Attack("integer_v_in_place", in_step(v=on_a_copy(lambda x: x.add_(1))), changed(v=lambda x: (x * 5).round())),
]

MEMORY = [*IN_THE_STEP, *OUTSIDE, *OUTPUTS]
