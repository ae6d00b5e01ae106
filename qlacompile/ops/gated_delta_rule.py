"""The operator ``qlacompile::gated_delta_rule_v1`` and what its arguments have to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import ArgumentError
from ..ir import Spec
from .family import Family, Tensors, register

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHAPES = {
    "q": "[B, T, Hk, K]",
    "k": "[B, T, Hk, K]",
    "v": "[B, T, Hv, V]",
    "g": "[B, T, Hv]",
    "beta": "[B, T, Hv]",
    "initial_state": "[N, Hv, K, V]",
}


def check(tensors: Tensors, parameters: Sequence[Any]) -> None:
    """Raise ``ArgumentError`` for arguments that do not fit together. Symbolic sizes are taken to fit.

    The values of ``cu_seqlens`` are looked at only where that costs no wait for a device, that is on the CPU.
    """
    q, k, v, g, beta, initial_state, cu_seqlens = tensors
    if q is None or k is None or v is None:
        raise ArgumentError("QLA401", "q, k and v: found None, expected a tensor for each")
    if cu_seqlens is None and type(v) is torch.Tensor and _plainly_fits(q, k, v, g, beta, initial_state):
        return
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    for name, x in named.items():
        if x is None:
            continue
        if x.dim() != _SHAPES[name].count(",") + 1:
            raise ArgumentError("QLA401", f"{name}: found shape {_show(x)}, expected {_SHAPES[name]}")
        if x.dtype not in _FLOATS:
            raise ArgumentError(
                "QLA402",
                f"{name}: found {x.dtype}, expected float32, float64, bfloat16 or float16; convert it with .to()",
            )
        if x.device != v.device:
            raise ArgumentError(
                "QLA403", f"{name}: found on {x.device}, expected {v.device} like v; move it with .to()"
            )
    batch, tokens, heads, values = v.shape
    key_heads, width = k.shape[2:]
    _expect("q", q, (batch, tokens, key_heads, width), "that of k")
    _expect("k", k, (batch, tokens, key_heads, width), "[B, T, Hk, K] with B and T of v")
    if _known(heads, key_heads) and (heads != 0 if key_heads == 0 else heads % key_heads != 0):
        raise ArgumentError(
            "QLA401",
            f"v: found {heads} value heads, expected a multiple of the {key_heads} heads of q and k; "
            "value head h uses key head h // (Hv / Hk)",
        )
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            _expect(name, x, (batch, tokens, heads), "one value for each token and head of v")
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, batch, tokens, v.device)
    if initial_state is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _expect("initial_state", initial_state, (sequences, heads, width, values), "[N, Hv, K, V] for N sequences")


def _plainly_fits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> bool:
    """The usual case, decided in a few comparisons because every decoded token pays for them; says nothing if false."""
    if not (q.dim() == k.dim() == v.dim() == 4) or q.shape != k.shape:
        return False
    (batch, tokens, heads, values), (_, _, key_heads, width) = v.shape, k.shape
    device = v.device
    return (
        k.shape[:2] == (batch, tokens)
        and key_heads > 0
        and heads % key_heads == 0
        and all(x is None or x.shape == (batch, tokens, heads) for x in (g, beta))
        and (initial_state is None or initial_state.shape == (batch, heads, width, values))
        and all(x is None or (x.dtype in _FLOATS and x.device == device) for x in (q, k, v, g, beta, initial_state))
    )


def _check_cu_seqlens(cu_seqlens: torch.Tensor, batch: Any, tokens: Any, device: torch.device) -> None:
    advice = "expected the N + 1 boundaries of N sequences in the one row of the batch, starting with 0"
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("QLA404", f"cu_seqlens: found {cu_seqlens.dtype}, expected int32 or int64")
    if cu_seqlens.dim() != 1 or (_known(cu_seqlens.shape[0]) and cu_seqlens.shape[0] == 0):
        raise ArgumentError("QLA404", f"cu_seqlens: found shape {_show(cu_seqlens)}, {advice}")
    if cu_seqlens.device != device:
        raise ArgumentError("QLA403", f"cu_seqlens: found on {cu_seqlens.device}, expected {device} like v")
    if _known(batch) and batch != 1:
        raise ArgumentError("QLA404", f"cu_seqlens: found a batch of {batch}, expected 1: flatten it into the tokens")
    if cu_seqlens.device.type == "cpu" and _has_values(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
            raise ArgumentError("QLA404", f"cu_seqlens: found {_brief(bounds)}, {advice}, never falling")
        if bounds[-1] > tokens:
            raise ArgumentError(
                "QLA404", f"cu_seqlens: found a last boundary of {bounds[-1]}, expected at most T={tokens}"
            )


def _has_values(x: torch.Tensor) -> bool:
    """False while a graph is traced."""
    return type(x) is torch.Tensor and not torch.compiler.is_compiling()


def _expect(name: str, x: torch.Tensor, shape: tuple[Any, ...], what: str) -> None:
    for found, expected in zip(x.shape, shape):
        if _known(found, expected) and found != expected:
            expectation = "[" + ", ".join(map(str, shape)) + "]"
            raise ArgumentError("QLA401", f"{name}: found shape {_show(x)}, expected {expectation}, {what}")


def _known(*sizes: Any) -> bool:
    """Comparing symbolic sizes would make the compiled graph valid for these sizes only."""
    return all(isinstance(size, int) for size in sizes)


def _show(x: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def _brief(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def describe(tensors: Tensors, out_dtype: torch.dtype | None) -> tuple[tuple[tuple[Any, ...], torch.dtype], ...]:
    """Shape and dtype of ``o [B, T, Hv, V]`` and ``final_state [N, Hv, K, V]``."""
    q, k, v, *_, cu_seqlens = tensors
    if q is None or k is None or v is None:
        raise ArgumentError("QLA401", "q, k and v: found None, expected a tensor for each")
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, v.shape[2], k.shape[3], v.shape[3])
    return (tuple(v.shape), out_dtype or v.dtype), (state, _widest(tensors[:6], torch.float32))


def describe_call(tensors: Tensors, parameters: Sequence[Any], needs_grad: bool) -> Spec:
    """What a kernel is asked to run. ``dtype`` is the widest of q, k and v: a kernel for bfloat16 sees only that."""
    q, k, v, g, beta, initial_state, cu_seqlens = tensors
    scale, eps = parameters
    if q is None or k is None or v is None:
        raise ArgumentError("QLA401", "q, k and v: found None, expected a tensor for each")
    return Spec(
        family="gated_delta_rule",
        form="direct",
        batch=v.shape[0],
        seq_len=v.shape[1],
        k_heads=k.shape[2],
        v_heads=v.shape[2],
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        dtype=v.dtype
        if q.dtype == k.dtype == v.dtype
        else torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype),
        device=v.device,
        state_dtype=torch.float32 if initial_state is None else initial_state.dtype,
        has_gate=g is not None,
        has_beta=beta is not None,
        has_initial_state=initial_state is not None,
        packed=cu_seqlens is not None,
        qk_l2norm=eps is not None,
        needs_grad=needs_grad,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        scale=scale,
    )


def _widest(tensors: Tensors, least: torch.dtype) -> torch.dtype:
    return torch.float64 if any(x is not None and x.dtype is torch.float64 for x in tensors) else least


FAMILY = Family(
    name="gated_delta_rule",
    version=1,
    tensors=("q", "k", "v", "g?", "beta?", "initial_state?", "cu_seqlens?"),
    differentiable=("q", "k", "v", "g", "beta", "initial_state"),
    unbatched=("cu_seqlens",),
    parameters=(("scale", "float"), ("qk_l2norm_eps", "float?")),
    outputs=("o", "final_state"),
    gradients=("do", "dht"),
    check=check,
    describe=describe,
    spec=describe_call,
)

gated_delta_rule, gated_delta_rule_backward = register(FAMILY)
