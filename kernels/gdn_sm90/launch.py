"""Building and launching the kernels: what the operator layer calls.

Kernels are built on first use, one lock for all (the compiler's own registries are not safe to enter twice), and kept
for the life of the process; TileLang keeps them on disk. No size but K is compiled in: a new batch, length or head
count builds nothing.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from qlacompile.errors import KernelError

CHUNK = 64
BLOCK = 64  # columns of V a block owns
GATES = 5  # rows of a chunk's gates
TARGET = {"kind": "cuda", "arch": "sm_90a"}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_lock = threading.Lock()
_built: dict[tuple[Any, ...], Callable[..., None]] = {}


def program(kind: str, *options: Any) -> tuple[Any, dict[str, Any]]:
    """The TileLang program of one variant and its pass configuration. Imports TileLang, needs no GPU."""
    from . import backward as bwd
    from . import scan as fwd
    from . import solve as inv
    from . import tiles

    make = {
        "solve": inv.solve,
        "states": fwd.states,
        "output": fwd.output,
        "scores": fwd.scores,
        "reverse": bwd.reverse,
        "gradients": bwd.gradients,
    }[kind]
    return make(*options), tiles.PASS_CONFIGS[kind]


def variants(K: int, dtype: str) -> list[tuple[Any, ...]]:
    """What a forward and a backward in ``dtype`` need; the l2norm inside the operator adds the float32 gradients."""
    return [
        ("solve", K, dtype),
        ("states", K, dtype),
        ("output", K, dtype, dtype),
        ("scores", K, dtype),
        ("reverse", K, dtype),
        ("gradients", K, dtype, dtype),
        ("gradients", K, dtype, "float32"),
    ]


def build(*key: Any) -> Callable[..., None]:
    """The kernel of one variant, built if need be."""
    found = _built.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _built:
            try:
                import tilelang

                with warnings.catch_warnings():  # of options that the pinned compiler still has
                    warnings.simplefilter("ignore", DeprecationWarning)
                    func, configs = program(*key)
                    _built[key] = tilelang.compile(
                        func, target=TARGET, execution_backend="tvm_ffi", pass_configs=dict(configs)
                    )
            except Exception as error:
                raise KernelError("QLA506", f"gdn_sm90 {key[0]} {key[1:]}: {type(error).__name__}: {error}") from error
        return _built[key]


def launch(key: tuple[Any, ...], *args: Any) -> None:
    """Run one variant on the current stream of the current device."""
    kernel = build(*key)
    try:
        kernel(*args)
    except Exception as error:
        raise KernelError("QLA507", f"gdn_sm90 {key[0]} {key[1:]}: {type(error).__name__}: {error}") from error


class _Inputs:
    """The arguments as the kernels want them: contiguous, gates in fp32, optional ones filled in."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        eps: float | None,
    ) -> None:
        self.B, self.T, self.Hk, self.K = k.shape
        self.Hv, self.V = v.shape[2:]
        self.NB = self.V // BLOCK
        self.group = self.Hv // self.Hk
        self.chunks = -(-self.T // CHUNK)
        if not q.dtype == k.dtype == v.dtype or v.dtype not in (torch.bfloat16, torch.float16):
            found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
            raise KernelError("QLA507", f"gdn_sm90 takes q, k and v in bfloat16 or all in float16, found {found}")
        self.dtype = v.dtype
        self.name = NAMES[v.dtype]
        self.device = v.device
        self.v = self.blocks(v)
        self.q, self.k = ((x if eps is None else l2norm(x, eps)).to(self.dtype).contiguous() for x in (q, k))
        gate_shape = (self.B, self.T, self.Hk, self.group)
        self.g = self.new(gate_shape).zero_() if g is None else g.float().contiguous().view(gate_shape)
        self.beta = self.new(gate_shape).fill_(1.0) if beta is None else beta.float().contiguous().view(gate_shape)
        self.state_shape = (self.B, self.Hv, self.K, self.NB, BLOCK)
        self.h0 = self.state(initial_state)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, Hv, V] -> [B, T, Hv, NB, 64]``."""
        return x.to(self.dtype).contiguous().view(self.B, self.T, self.Hv, self.NB, BLOCK)

    def state(self, x: torch.Tensor | None) -> torch.Tensor:
        return self.new(self.state_shape).zero_() if x is None else x.float().contiguous().view(self.state_shape)

    def tiles(self, columns: int, *, blocks: bool = True) -> torch.Tensor:
        """Scratch: one tile of ``[64, columns]`` per chunk and v head, and per block of V."""
        count = self.B * self.chunks * self.Hv * (self.NB if blocks else 1)
        return self.new((count, BLOCK, columns), self.dtype)

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """N and the gates of every chunk."""
        N = self.tiles(CHUNK, blocks=False)
        gates = self.new((N.shape[0], GATES, CHUNK))
        launch(("solve", self.K, self.name), self.k, self.g, self.beta, N, gates)
        return N, gates

    def states(self, N: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last state, and of every chunk the state before it and u."""
        ht, h, u = self.new(self.state_shape), self.tiles(self.K), self.tiles(CHUNK)
        launch(("states", self.K, self.name), self.k, self.v, N, gates, self.h0, ht, h, u)
        return ht, h, u


def l2norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(sum x^2 + eps)`` in fp32; the caller rounds."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def l2norm_backward(x: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    """The gradient of :func:`l2norm`, in fp32."""
    x = x.float()
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return rstd * dy - x * (rstd.pow(3) * (x * dy).sum(-1, keepdim=True))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    qk_l2norm_eps: float | None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, final_state)``; ``o`` in ``out_dtype`` (that of v if None), the state in fp32 (fp64 if an input is)."""
    if cu_seqlens is not None:
        raise KernelError("QLA507", "gdn_sm90 does not take cu_seqlens")
    out_dtype = out_dtype or v.dtype
    inputs = (g, beta, initial_state)
    state_dtype = torch.float64 if any(i is not None and i.dtype == torch.float64 for i in inputs) else torch.float32
    with torch.cuda.device(v.device):
        x = _Inputs(q, k, v, g, beta, initial_state, qk_l2norm_eps)
        shape, state_shape = (x.B, x.T, x.Hv, x.V), (x.B, x.Hv, x.K, x.V)
        if x.B * x.T == 0:
            return x.new(shape, out_dtype), x.h0.clone().view(state_shape).to(state_dtype)
        kernel_dtype = x.dtype if out_dtype == x.dtype else torch.float32
        N, gates = x.solve()
        ht, h, u = x.states(N, gates)
        o = x.new((*shape[:2], x.Hv * x.NB, BLOCK), kernel_dtype)
        key = ("output", x.K, x.name, NAMES[kernel_dtype])
        launch(key, x.q, x.k, gates, h, u, o, x.group, x.NB, float(scale))
        return o.view(shape).to(out_dtype), ht.view(state_shape).to(state_dtype)


def backward(
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
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, g, beta and the initial state, each in its input's dtype, None where ``needs`` is False."""
    if cu_seqlens is not None:
        raise KernelError("QLA507", "gdn_sm90 does not take cu_seqlens")
    inputs = (q, k, v, g, beta, initial_state)
    with torch.cuda.device(v.device):
        x = _Inputs(*inputs, qk_l2norm_eps)
        dh_end = x.state(dht)
        if x.B * x.T == 0:
            grads = [*(torch.zeros_like(i) if i is not None else None for i in inputs[:5]), dh_end.clone()]
        else:
            dout = x.new(x.v.shape, x.dtype).zero_() if do is None else x.blocks(do)
            grads = _gradients(x, dout, dh_end, float(scale), qk_l2norm_eps, q, k)
    return tuple(
        grad.view(i.shape).to(i.dtype) if need and grad is not None and i is not None else None
        for grad, i, need in zip(grads, inputs, needs)
    )


def _gradients(
    x: _Inputs,
    do: torch.Tensor,
    dht: torch.Tensor,
    scale: float,
    eps: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> list[torch.Tensor | None]:
    N, gates = x.solve()
    _, h, u = x.states(N, gates)
    P = x.tiles(CHUNK, blocks=False)
    launch(("scores", x.K, x.name), x.q, x.k, gates, P, x.group, scale)
    norm = scale or 1.0  # the reverse scan carries dS / scale
    dv, dh0, dh, dx = x.new(x.v.shape, x.dtype), x.new(x.state_shape), x.tiles(x.K), x.tiles(CHUNK)
    launch(("reverse", x.K, x.name), x.q, x.k, do, N, P, gates, dht, dv, dh0, dh, dx, norm, 1.0 / norm, scale / norm)
    grad_dtype = x.dtype if eps is None else torch.float32
    dq, dk = x.new(x.q.shape, grad_dtype), x.new(x.k.shape, grad_dtype)
    dg, dbeta = x.new(x.g.shape), x.new(x.g.shape)
    key = ("gradients", x.K, x.name, NAMES[grad_dtype])
    rows = (x.B, x.T, x.Hv * x.NB, BLOCK)
    tensors = (x.q, x.k, x.v.view(rows), do.view(rows), gates, h, u, dh, dx, dq, dk, dg, dbeta)
    launch(key, *tensors, x.NB, scale, norm)
    if eps is not None:
        dq, dk = l2norm_backward(q, dq, eps), l2norm_backward(k, dk, eps)
    return [dq, dk, dv, dg, dbeta, dh0]
