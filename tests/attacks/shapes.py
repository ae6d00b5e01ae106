"""Operands that are broadcast, axes of equal or unit size, layouts, chunk forms, and calls with other arguments."""

from __future__ import annotations

import torch

from attacks.attack import Attack, Sequence, changed, chunked, in_step, inputs, loop, noise, with_state
from near_misses.lookalike import read, write, zeros


def q_of_one_sequence(q, k, v, g, beta):
    return loop(q, k, v, g, beta, torch.zeros(2, 3, 4, 5))


def beta_of_heads(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta)
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def scaled(q, k, v, g, beta, s):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t] * s, g[:, t] * s, beta[:, t])
        outs.append(read(S, q[:, t] * s))
    return torch.stack(outs, 1), S


def value_by_key(q, k, v, g, beta, S):
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t][..., None, :]).sum(-1))
        S = S + u[..., None] * k[:, t][..., None, :]
        outs.append((S * q[:, t][..., None, :]).sum(-1))
    return torch.stack(outs, 1), S


def value_by_key_flat(q, k, v, g, beta, S):
    o, S = value_by_key(q, k, v, g, beta, S)
    return o, S.view(2, 3, 20)


def scaled_operands(q, k, v, g, beta):
    return in_step(
        k=lambda x: x * 2 - 0.1, v=lambda x: x * 2, g=lambda x: x * 0.5, beta=lambda x: x * 0.1, q=torch.tanh
    )(q, k, v, g, beta)


def head_first(q, k, v, g, beta):
    S, o = zeros(q.transpose(1, 2), v.transpose(1, 2)), torch.zeros_like(v)
    for t in range(q.shape[2]):
        S = write(S, k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t])
        o[:, :, t] = read(S, q[:, :, t])
    return o, S


def head_first_viewed(q, k, v, g, beta):
    o, S = head_first(q, k, v, g, beta)
    return o.view(o.shape[0] * o.shape[1], o.shape[2], -1), S.view(-1)


def turned():
    return tuple(x.transpose(1, 2).contiguous() for x in inputs())


def one_value(**sizes):
    return lambda: inputs(B=1, T=8, V=1, **sizes)


def vk_args(**sizes):
    def make():
        args = inputs(state=True, **sizes)
        return (*args[:5], args[5].transpose(-1, -2).contiguous())

    return make


TOKENS = [
    Attack("q_of_one_sequence_for_two", q_of_one_sequence, changed(q=lambda x: x[:1])),
    Attack("beta_of_heads", beta_of_heads, changed(beta=lambda x: x[0, 0])),
    Attack("beta_of_heads_as_many_as_sequences", beta_of_heads, lambda: (*inputs(B=3)[:4], noise(3).sigmoid())),
    Attack("beta_of_sequences", beta_of_heads, changed(beta=lambda x: x[:, 0, :1])),
    Attack("beta_of_sequences_as_many_as_heads", beta_of_heads, lambda: (*inputs(B=3)[:4], noise(3, 1).sigmoid())),
    Attack("one_value_column", loop, one_value()),
    Attack("one_value_column_scaled_operands", scaled_operands, one_value()),
    Attack("one_value_column_transposed_state", value_by_key, vk_args(B=1, T=8, V=1)),
    Attack("one_value_column_two_sequences", scaled_operands, lambda: inputs(T=6, H=2, V=1)),
    Attack("all_sizes_one", scaled_operands, lambda: inputs(1, 3, 1, 1, 1)),
    Attack("all_sizes_four", scaled_operands, lambda: inputs(4, 4, 4, 4, 4)),
    Attack("constant_tensor_in_step", in_step(beta=lambda x: x * torch.tensor(1.5)), inputs),
    Attack("constant_vector_in_step", in_step(beta=lambda x: x * torch.tensor([1.5, 0.5, 1.0])), inputs),
    Attack("scalar_tensor_argument", scaled, lambda: (*inputs(), torch.tensor(0.3))),
    Attack("transposed_state_viewed", value_by_key_flat, vk_args()),
    Attack("transposed_state_contiguous", value_by_key, vk_args(), layout=True),
    Attack("head_first_viewed", head_first_viewed, turned),
    Attack("head_first_contiguous", head_first, turned, layout=True),
    Attack("token_first_contiguous", loop, with_state(), layout=True),
]


def large():
    return tuple(x * (200 if i == 2 else 1) for i, x in enumerate(inputs(T=32)))


def chunked_state_clamped(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o, S.clamp(-50, 50)


def chunked_output_clamped(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o.clamp(-50, 50), S


def chunked_transposed(q, k, v, g, beta, S):
    return chunked(q, k, v, g, beta, S, transposed=True)


def chunked_transposed_output_only(q, k, v, g, beta, S):
    return chunked(q, k, v, g, beta, S, transposed=True)[0]


def chunked_flat(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o.transpose(1, 2).view(6, 32, 5), S.view(-1)


CHUNKS = [
    Attack("chunked_state_clamped", chunked_state_clamped, large),
    Attack("chunked_output_clamped", chunked_output_clamped, large),
    Attack("chunked_transposed_state", chunked_transposed, vk_args(T=32)),
    Attack("chunked_transposed_state_unused", chunked_transposed_output_only, vk_args(T=32)),
    Attack("chunked_transposed_square_state", chunked_transposed, vk_args(T=32, V=4)),
    Attack("chunked_viewed", chunked_flat, lambda: inputs(T=32)),
]

SHAPES = [*TOKENS, *CHUNKS]


def output_times(q, k, v, g, beta, s):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = write(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(read(S, q[:, t]) * s)
    return torch.stack(outs, 1), S


def q_times(q, k, v, g, beta, s):
    return loop(q * s, k, v, g, beta)


def one_solve(q, k, v, g, beta, restrict):
    """All tokens in one solve; ``restrict`` removes what is far from the diagonal, which short inputs do not have."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    T, G = q.shape[2], g.cumsum(-1)
    D = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
    A = (beta[..., None] * (k @ k.mT) * D).tril(-1)
    u = torch.linalg.solve_triangular(A + torch.eye(T), beta[..., None] * v, upper=False)
    return (restrict((q @ k.mT) * D) @ u).transpose(1, 2)


def banded(q, k, v, g, beta):
    t = torch.arange(q.shape[1])
    return one_solve(q, k, v, g, beta, lambda A: A * (t[:, None] - t < 16).float())


def banded_by_triu(q, k, v, g, beta):
    return one_solve(q, k, v, g, beta, lambda A: A.triu(-15))


SEQUENCES = [
    *(
        Sequence(f"{name}_argument_of_{role}", fn, tuple((*inputs(), s) for s in numbers))
        for name, numbers in (("int", (3, 4, 5)), ("float", (0.1, 0.2, 0.3)))
        for role, fn in (("q", q_times), ("output", output_times), ("v_and_g", scaled))
    ),
    Sequence("batch_sizes", loop, tuple(inputs(B=B) for B in (2, 3, 5, 1))),
    Sequence("lengths", loop, tuple(inputs(T=T) for T in (6, 9, 1, 2, 7))),
    Sequence("banded_solve_of_dynamic_length", banded, tuple(inputs(T=T) for T in (8, 13, 30)), dynamic_dim=1),
    Sequence("triu_solve_of_dynamic_length", banded_by_triu, tuple(inputs(T=T) for T in (8, 13, 30)), dynamic_dim=1),
]
