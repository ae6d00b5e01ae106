"""The operators with the names and signatures of flash-linear-attention: plain Python around one operator call."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .gated_delta_rule import gated_delta_rule

_L2NORM_EPS = 1e-6  # flash-linear-attention's

_ADVICE = {
    "head_first": "transpose heads and tokens so that the tensors are [B, T, H, ...] and leave it out",
    "transpose_state_layout": "it was renamed: pass state_v_first",
    "cp_context": "context parallelism is not supported; leave it out",
}


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    kernel: str = "auto",
    strict: bool = False,
    **unsupported: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over sequences, differentiable once; traced by ``torch.compile`` without a graph break.

    For each token t and value head h, with the key head ``h // (Hv / Hk)``::

        S~ = exp(g_t) S;   u = beta_t (v_t - S~^T k_t);   S = S~ + k_t u^T;   o_t = scale S^T q_t

    Args:
        q, k: ``[B, T, Hk, K]``; float32, float64, bfloat16 or float16, like all floating arguments. Any strides.
        v: ``[B, T, Hv, V]``, Hv a multiple of Hk.
        g: ``[B, T, Hv]``, natural logarithm of the decay; ``None`` for no decay.
        beta: ``[B, T, Hv]``; ``None`` for 1.
        scale: ``K ** -0.5`` if ``None``.
        initial_state: ``[N, Hv, K, V]`` for N sequences (N = B unless packed); zeros if ``None``.
        output_final_state: return the state after the last token as well.
        use_qk_l2norm_in_kernel: replace q and k by ``x / sqrt(sum(x^2) + 1e-6)`` first.
        use_beta_sigmoid_in_kernel: replace beta by ``sigmoid(beta)`` first, by twice that with ``allow_neg_eigval``.
        state_v_first: both states are ``[N, Hv, V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64, boundaries of N sequences packed into one row (B = 1). Rows after the
            last boundary are not read, and are zero in o and in all gradients. Its values are checked if it is on the
            CPU and the call is not being traced.
        cu_seqlens_cpu, chunk_indices, chunk_size: accepted; they steer how other implementations work, not the result.
        use_gate_in_kernel: replace g by ``-exp(A_log) * softplus(g + dt_bias)`` first, both ``[Hv]``.
        kernel: name of a kernel, or "auto".
        strict: raise ``KernelError`` if the kernel fails, instead of a warning and the portable kernel.

    Returns:
        ``o [B, T, Hv, V]`` in the dtype of v, and the final state (float32; float64 if any argument is) or ``None``.

    Raises:
        ArgumentError: QLA401 shape, QLA402 dtype, QLA403 device, QLA404 cu_seqlens, QLA405 value or keyword.
        KernelError: the kernel failed and ``strict`` is set.
    """
    if cp_context is not None:
        unsupported = {**unsupported, "cp_context": cp_context}
    _refuse(unsupported)
    if chunk_size is not None and chunk_size not in (16, 32, 64):
        raise ArgumentError("QLA405", f"chunk_size: found {chunk_size}, expected 16, 32 or 64, or leave it out")
    if (cu_seqlens_cpu is not None or chunk_indices is not None) and cu_seqlens is None:
        raise ArgumentError(
            "QLA404", "cu_seqlens: found None beside cu_seqlens_cpu or chunk_indices, expected the boundaries as well"
        )
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias)
    elif A_log is not None or dt_bias is not None:
        raise ArgumentError("QLA405", "A_log or dt_bias: found without use_gate_in_kernel=True, expected both or none")
    if use_beta_sigmoid_in_kernel:
        beta = _sigmoid(beta, allow_neg_eigval)
    elif allow_neg_eigval:
        raise ArgumentError(
            "QLA405",
            "allow_neg_eigval: found True without use_beta_sigmoid_in_kernel, expected both; "
            "if beta is in (0, 2) already, leave it out",
        )
    if scale is None:
        scale = k.shape[-1] ** -0.5
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    eps = _L2NORM_EPS if use_qk_l2norm_in_kernel else None
    o, final = gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, eps, None, kernel, strict)
    if not output_final_state:
        return o, None
    return o, final.transpose(-1, -2).contiguous() if state_v_first else final


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    kernel: str = "auto",
    strict: bool = False,
    **unsupported: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule for decoding, with the signature of ``fused_recurrent_gated_delta_rule``.

    Computes the same as :func:`chunk_gated_delta_rule`, see there; a single token takes a direct path.
    ``gk`` and ``gv``, decays per channel, belong to another family and must be ``None``.
    """
    for name, decay in (("gk", gk), ("gv", gv)):
        if decay is not None:
            raise ArgumentError(
                "QLA405", f"{name}: found a decay per channel, expected None: the gated delta rule decays heads, see g"
            )
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        kernel=kernel,
        strict=strict,
        **unsupported,
    )


def _refuse(unsupported: dict[str, Any]) -> None:
    for name in unsupported:
        advice = _ADVICE.get(name, "leave it out")
        raise ArgumentError("QLA405", f"{name}: found a keyword that the gated delta rule does not have; {advice}")


def _gate(g: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> torch.Tensor:
    if g is None or A_log is None:
        raise ArgumentError("QLA405", "use_gate_in_kernel: found True without g and A_log, expected both")
    g = _full(g)
    if dt_bias is not None:
        g = g + _full(dt_bias)
    return -_full(A_log).exp() * torch.nn.functional.softplus(g)


def _sigmoid(beta: torch.Tensor | None, doubled: bool) -> torch.Tensor:
    if beta is None:
        raise ArgumentError("QLA405", "use_beta_sigmoid_in_kernel: found True without beta, expected the raw beta")
    beta = _full(beta).sigmoid()
    return beta * 2 if doubled else beta


def _full(x: torch.Tensor) -> torch.Tensor:
    """At least float32: bfloat16 would round a decay near 1 to 1."""
    return x if x.dtype == torch.float64 else x.float()
