"""Programs whose values are plain and whose gradients are not, and effects that no output shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attacks.attack import Attack, chunked, in_step, inputs, loop, with_state
from near_misses.lookalike import read, zeros


def detached(x):
    return x.detach()


def erase_key_detached(q, k, v, g, beta):
    S, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - (S * k[:, t].detach()[..., None]).sum(-2))
        S = S + k[:, t][..., None] * u[..., None, :]
        outs.append(read(S, q[:, t]))
    return torch.stack(outs, 1), S


def chunked_state_detached(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o, S.detach()


def chunked_state_detached_once(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o, S * 2, S.detach() * 3


def chunked_output_detached(q, k, v, g, beta):
    o, S = chunked(q, k, v, g, beta)
    return o.detach(), S


def chunked_initial_state_detached(q, k, v, g, beta, S):
    return chunked(q, k, v, g, beta, S.detach())


DETACHED = [
    *(Attack(f"{role}_detached_in_step", in_step(**{role: detached}), inputs) for role in ("q", "k", "v", "g", "beta")),
    Attack("output_detached_in_step", in_step(out=lambda x: x + x.detach()), inputs),
    Attack("erase_key_detached", erase_key_detached, inputs),
    Attack("chunked_state_detached", chunked_state_detached, lambda: inputs(T=32)),
    Attack("chunked_state_detached_once", chunked_state_detached_once, lambda: inputs(T=32)),
    Attack("chunked_output_detached", chunked_output_detached, lambda: inputs(T=32)),
    Attack("chunked_initial_state_detached", chunked_initial_state_detached, with_state(T=32)),
]


def zeros_without(q, k, v, g, beta):
    with torch.no_grad():
        S = zeros(q, v) * 1
    return loop(q, k, v, g, beta, S)


def constant_zeros_without(q, k, v, g, beta):
    with torch.no_grad():
        S = torch.zeros(2, 3, 4, 5)
    return loop(q, k, v, g, beta, S)


def state_copied_without(q, k, v, g, beta, S):
    with torch.no_grad():
        S = S.clone()
    return loop(q, k, v, g, beta, S)


def gate_without(q, k, v, g, beta, S=None):
    with torch.no_grad():
        g = g - 0.1
    return loop(q, k, v, g, beta, S)


def loop_without(q, k, v, g, beta, S=None):
    S = zeros(q, v) if S is None else S
    with torch.no_grad():
        o, S = loop(q, k, v, g, beta, S)
    return o + q.sum(), S + k.sum()


def scaled_without(q, k, v, g, beta):
    with torch.no_grad():
        q, k = q * 0.5, k.transpose(1, 2).contiguous().transpose(1, 2)
    return loop(q, k, v, g, beta)


def copied_without(q, k, v, g, beta):
    with torch.no_grad():
        q, v, g, beta = q.clone(), v.clone(), g.contiguous().clone(), beta.clone()
    return loop(q, k, v, g, beta)


def cast_without(q, k, v, g, beta):
    with torch.no_grad():
        q, g = q.float(), g.float()
    return loop(q, k.float(), v.float(), g, beta.float())


def norm_without(q, k, v, g, beta):
    def unit(x):
        with torch.no_grad():
            r = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return x * r

    return loop(unit(q), unit(k), v, g, beta)


def normalised_without(q, k, v, g, beta):
    with torch.no_grad():
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return loop(q, k, v, g, beta)


def chunked_zeros_without(q, k, v, g, beta):
    with torch.no_grad():
        S = torch.zeros(2, 3, 4, 5)
    return chunked(q, k, v, g, beta, S)


def chunked_q_without(q, k, v, g, beta):
    with torch.no_grad():
        q = q * 2
    return chunked(q, k, v, g, beta)


def chunked_all_without(q, k, v, g, beta):
    with torch.no_grad():
        o, S = chunked(q, k, v, g, beta)
    return o + q.sum(), S + k.sum()


NO_GRAD = [
    Attack("zeros_in_no_grad", zeros_without, inputs),
    Attack("constant_zeros_in_no_grad", constant_zeros_without, inputs),
    Attack("initial_state_copied_in_no_grad", state_copied_without, with_state()),
    Attack("gate_in_no_grad", gate_without, inputs),
    Attack("gate_in_no_grad_with_initial_state", gate_without, with_state()),
    Attack("loop_in_no_grad", loop_without, inputs),
    Attack("loop_in_no_grad_with_initial_state", loop_without, with_state()),
    Attack("q_scaled_in_no_grad", scaled_without, inputs),
    Attack("operands_copied_in_no_grad", copied_without, inputs),
    # gradients of bf16 leaves are bf16 themselves
    Attack("operands_cast_in_no_grad", cast_without, lambda: inputs(dtype=torch.bfloat16), bound=5e-3),
    Attack("l2norm_without_gradient_of_the_norm", norm_without, inputs),
    Attack("l2norm_in_no_grad", normalised_without, inputs),
    Attack("chunked_zeros_in_no_grad", chunked_zeros_without, lambda: inputs(T=32)),
    Attack("chunked_q_in_no_grad", chunked_q_without, lambda: inputs(T=32)),
    Attack("chunked_in_no_grad", chunked_all_without, lambda: inputs(T=32)),
]


def state_hook(q, k, v, g, beta):
    o, S = loop(q, k, v, g, beta)
    S.register_hook(lambda x: x * 2)
    return o, S


def output_hook(q, k, v, g, beta):
    o, S = loop(q, k, v, g, beta)
    o.register_hook(lambda x: x * 2)
    return o, S


def draws_between(q, k, v, g, beta):
    """The second draw depends on the first, which nothing reads."""
    torch.rand(3)
    o, S = loop(q, k, v, g, beta)
    return o, S, torch.rand(2)


def draws_after(q, k, v, g, beta):
    o, S = loop(q, k, v, g, beta)
    return o, S, torch.rand(2)


def dropout_unused(q, k, v, g, beta):
    F.dropout(v, 0.5, training=True)
    return *loop(q, k, v, g, beta), torch.rand(2)


class UnusedBatchNorm(torch.nn.Module):
    """Only its running statistics tell that it ran."""

    def __init__(self):
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(5)

    def forward(self, q, k, v, g, beta):
        self.bn(v.flatten(0, 2))
        return loop(q, k, v, g, beta)


class KeptState(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("S", torch.zeros(2, 3, 4, 5))

    def forward(self, q, k, v, g, beta):
        o, S = loop(q, k, v, g, beta, self.S)
        self.S = S.detach()
        return o, S


EFFECTS = [
    Attack("hook_on_the_final_state", state_hook, inputs),
    Attack("hook_on_the_output", output_hook, inputs),
    Attack("random_numbers_before_and_after", draws_between, inputs),
    Attack("random_numbers_after", draws_after, inputs),
    Attack("unused_dropout", dropout_unused, inputs),
    Attack("unused_batch_norm", UnusedBatchNorm, inputs),
    Attack("state_kept_in_a_buffer", KeptState, inputs),
]

AUTOGRAD = [*DETACHED, *NO_GRAD, *EFFECTS]
