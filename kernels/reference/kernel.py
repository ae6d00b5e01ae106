"""The portable kernel behind the protocol of ``kernels/README.md``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qlacompile.ir import Spec
from qlacompile.kernels.reference.chunk import arena, outputs, prepare, scan_forward
from qlacompile.kernels.reference.chunk_backward import backward, unnormalised_keys, unscaled_queries
from qlacompile.kernels.reference.layout import Layout, dense_layout, packed_layout
from qlacompile.kernels.reference.precision import compute_dtype, exact_matmul
from qlacompile.kernels.reference.step import step


class ReferenceKernel:
    """The gated delta rule on every device, for every size and floating dtype.

    Computes in float32, in float64 if any input is float64, and never in less. Deterministic as far as the matrix
    multiplications of the device are. Reads ``cu_seqlens`` on the host (so packed sequences wait for the device and can
    not be captured into a CUDA graph); reads no other values.
    """

    name = "reference"
    family = "gated_delta_rule"
    version = 1
    priority = 0

    def supports(self, spec: Spec) -> tuple[str, str] | None:
        """Everything of its family that has a floating dtype."""
        if not spec.dtype.is_floating_point:
            return "QLA502", f"{spec.dtype} is not a floating-point dtype"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        scale: float,
        qk_l2norm_eps: float | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``o [B, T, Hv, V]`` of ``out_dtype`` and ``final_state [N, Hv, K, V]`` of the compute dtype."""
        dtype = compute_dtype(q, k, v, g, beta, initial_state)
        with exact_matmul():
            if v.shape[1] == 1 and cu_seqlens is None and k.numel() and v.numel():
                o, final = step(q, k, v, g, beta, initial_state, scale, qk_l2norm_eps, dtype)
                return o.to(out_dtype), final
            layout = _layout(v, cu_seqlens)
            state = _load_state(layout, initial_state, k, v, cu_seqlens, dtype)
            if _is_empty(layout, k, v):
                return v.new_zeros(v.shape, dtype=out_dtype), _store_state(layout, state, v)
            memory = arena(layout, dtype, k, v)
            x = prepare(memory, layout, dtype, q, k, v, g, beta, scale, qk_l2norm_eps)
            scan = scan_forward(memory, x, state, keep_states=False)
            return layout.store(outputs(memory, x, scan), out_dtype), _store_state(layout, scan.final, v)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        do: torch.Tensor | None,
        dht: torch.Tensor | None,
        scale: float,
        qk_l2norm_eps: float | None,
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v, g, beta, initial_state, each in the dtype of its input; recomputes the forward."""
        inputs = (q, k, v, g, beta, initial_state)
        wanted = tuple(x is not None and bool(need) for x, need in zip(inputs, needs))
        dtype = compute_dtype(*inputs)
        layout = _layout(v, cu_seqlens)
        grads: list[torch.Tensor | None] = [None] * 6
        if not (do is None and dht is None):
            dstate = _load_state(layout, dht, k, v, cu_seqlens, dtype)
            if _is_empty(layout, k, v):
                grads[5] = _store_state(layout, dstate, v)
            else:
                with exact_matmul():
                    memory = arena(layout, dtype, k, v)
                    x = prepare(memory, layout, dtype, q, k, v, g, beta, scale, qk_l2norm_eps)
                    state = _load_state(layout, initial_state, k, v, cu_seqlens, dtype)
                    scan = scan_forward(memory, x, state, keep_states=True)
                    chunked = backward(x, scan, _load(layout, do, dtype), dstate, wanted)
                    if chunked.state is not None:
                        grads[5] = _store_state(layout, chunked.state, v)
                    tokens = (unscaled_queries(x, chunked.q, scale), unnormalised_keys(x, chunked.k), chunked.v)
                    for i, grad in enumerate((*tokens, chunked.g, chunked.beta)):
                        like = inputs[i]
                        if grad is not None and like is not None:
                            grads[i] = layout.store(grad, like.dtype).view(like.shape)
        return tuple(_finish(grad, x) if want else None for x, want, grad in zip(inputs, wanted, grads))


def _finish(grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient in the dtype of its input; one that nothing contributed to is zero."""
    if x is None:
        return None
    return x.new_zeros(x.shape) if grad is None else grad.to(x.dtype)


def _layout(v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Layout:
    if cu_seqlens is not None:
        return packed_layout(cu_seqlens, v.shape[1])
    if v.shape[0] == 0 or v.shape[1] == 0:
        return Layout(1, (), v.shape[0], v.shape[1])
    return dense_layout(v.shape[0], v.shape[1])


def _is_empty(layout: Layout, k: torch.Tensor, v: torch.Tensor) -> bool:
    return layout.chunks == 0 or k.numel() == 0 or v.numel() == 0


def _load(layout: Layout, x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """``x [B, T, H, D]`` as ``[M, H, C, D]``."""
    if x is None:
        return None
    out = x.new_empty((layout.chunks, x.shape[2], layout.chunk, x.shape[3]), dtype=dtype)
    layout.load(x, out)
    return out


def _load_state(
    layout: Layout,
    state: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``[N, Hv, K, V]`` as a new ``[N, Hk, K, R * V]`` in the layout's order of sequences; zeros for ``None``."""
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    (hk, width), (hv, values) = k.shape[2:], v.shape[2:]
    shape = (sequences, hk, width, hv // hk if hk else 0, values)
    if state is None:
        return v.new_zeros(shape, dtype=dtype).flatten(3)
    out = v.new_empty(shape, dtype=dtype)
    out.transpose(2, 3).copy_(layout.sort(state).unflatten(1, shape[1:4:2]))
    return out.flatten(3)


def _store_state(layout: Layout, state: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_load_state`."""
    heads, values = v.shape[2:]
    n, hk, width, _ = state.shape
    by_head = state.view(n, hk, width, heads // hk if hk else 0, values).transpose(2, 3)
    return layout.unsort(by_head.reshape(n, heads, width, values))
