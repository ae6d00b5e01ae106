"""What a zoo entry is: a function that writes Gated DeltaNet in its own way, and how to call and check it.

Canonical form, here and everywhere: q, k [B,T,Hk,K]; v [B,T,Hv,V]; log gate g and beta [B,T,Hv]; state [B,Hv,K,V].
A spelling has layouts of its own; ``make`` gives arguments in them and ``reference`` gives the result in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle import recurrence

# canonical [B,T,H,...] to the layout's own, and back
_TO: dict[str, Callable[[Tensor], Tensor]] = {
    "BTHD": lambda x: x,
    "BHTD": lambda x: x.transpose(1, 2),
    "TBHD": lambda x: x.transpose(0, 1),
    "THD": lambda x: x[0],
    "TD": lambda x: x[0, :, 0],
}
_FROM: dict[str, Callable[[Tensor], Tensor]] = {
    "BTHD": lambda x: x,
    "BHTD": lambda x: x.transpose(1, 2),
    "TBHD": lambda x: x.transpose(0, 1),
    "THD": lambda x: x[None],
    "TD": lambda x: x[None, :, None],
}
_LEAD = {"THD": 1, "TD": 2}  # leading state dims (batch, head) that the layout drops


@dataclass(frozen=True)
class Canonical:
    """The operator's arguments that a call of a spelling means."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    state: Tensor


@dataclass(frozen=True)
class Spelling:
    """``fn(q, k, v[, gate][, beta][, state])`` returns ``(o, state)``, or ``o`` if not ``final``."""

    name: str
    fn: Callable[..., Any]
    layout: str = "BTHD"  # a key of _TO
    gate: str = "log"  # "log", "linear" (the decay itself is passed) or "none"
    beta: bool = True
    state: str = "KV"  # or "VK"
    initial: bool = False  # takes a state as its last argument
    final: bool = True
    scaled: bool = True  # K ** -0.5 on q or o; else 1
    grouped: bool = False  # accepts Hv a multiple of Hk
    normalised: bool = False  # does the l2 norm of q and k itself
    float32_inside: bool = False  # computes in float32 whatever the arguments are
    grads: bool = True  # False: eager autograd refuses it, because it overwrites what a gradient needs
    regions: int = 1  # how many matches it gives
    must_match: bool = True  # False: correct GDN, but the compiler may refuse it (and must then say why)
    # for entries whose arguments are not the standard ones: (canonical arguments) -> args, and args -> Canonical
    encode: Callable[..., tuple[Tensor, ...]] | None = None
    decode: Callable[..., Canonical] | None = None

    def make(
        self,
        seed: int = 0,
        B: int = 2,
        T: int = 24,
        Hk: int = 2,
        Hv: int | None = None,
        K: int = 8,
        V: int = 12,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, ...]:
        """Arguments for ``fn``. Sizes that the spelling does not have (no batch, no heads) are taken as 1."""
        B = 1 if self.layout in _LEAD else B
        Hk = 1 if self.layout == "TD" else Hk
        Hv = Hk if not self.grouped else 2 * Hk if Hv is None else Hv
        c = canonical_inputs(seed, B, T, Hk, Hv, K, V, dtype, norm=not self.normalised)
        if self.encode is not None:
            return self.encode(c)
        to = _TO[self.layout]
        args = [to(c.q), to(c.k), to(c.v)]
        if self.gate != "none":
            args.append(to(c.g.exp() if self.gate == "linear" else c.g))
        if self.beta:
            args.append(to(c.beta))
        if self.initial:
            args.append(self._state_out(c.state))
        return tuple(a.contiguous() for a in args)

    def canonical(self, args: tuple[Tensor, ...], detach: bool = True) -> Canonical:
        """What ``args`` mean, in float64."""
        args = tuple((a.detach() if detach else a).double() for a in args)
        if self.decode is not None:
            return self.decode(*args)
        back = _FROM[self.layout]
        rest = list(args[3:])
        q, k, v = (back(a) for a in args[:3])
        ones = torch.ones(v.shape[:3], dtype=v.dtype, device=v.device)
        gate = back(rest.pop(0)) if self.gate != "none" else 0 * ones
        beta = back(rest.pop(0)) if self.beta else ones
        if self.normalised:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        B, _, Hv, V = v.shape
        state = self._state_in(rest.pop(0)) if self.initial else v.new_zeros(B, Hv, q.shape[-1], V)
        scale = q.shape[-1] ** -0.5 if self.scaled else 1.0
        return Canonical(q, k, v, gate.log() if self.gate == "linear" else gate, beta, scale, state)

    def reference(self, args: tuple[Tensor, ...], detach: bool = True) -> tuple[Tensor, Tensor]:
        """``(o, state)`` in the spelling's layouts, token by token in float64; differentiable if not ``detach``."""
        o, state = token_oracle(self.canonical(args, detach))
        return _TO[self.layout](o), self._state_out(state)

    def outputs(self, result: Any) -> tuple[Tensor, ...]:
        """What ``fn`` returned, as a tuple: ``(o, state)`` or ``(o,)``."""
        return tuple(result) if self.final else (result,)

    def _state_out(self, state: Tensor) -> Tensor:
        for _ in range(_LEAD.get(self.layout, 0)):
            state = state[0]
        return state.transpose(-1, -2) if self.state == "VK" else state

    def _state_in(self, state: Tensor) -> Tensor:
        for _ in range(_LEAD.get(self.layout, 0)):
            state = state[None]
        return state.transpose(-1, -2) if self.state == "VK" else state


def canonical_inputs(
    seed: int, B: int, T: int, Hk: int, Hv: int, K: int, V: int, dtype: torch.dtype, norm: bool = True
) -> Canonical:
    """Random inputs with keys of length one, decays between 0.3 and 1, and beta in (0, 1), as trained layers have."""
    gen = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    q, k, v = randn(B, T, Hk, K), randn(B, T, Hk, K), randn(B, T, Hv, V)
    g = -1.2 * torch.rand(B, T, Hv, generator=gen, dtype=torch.float64)
    beta = randn(B, T, Hv).sigmoid()
    state = randn(B, Hv, K, V) / 2
    if norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return Canonical(*(x.to(dtype) for x in (q, k, v, g, beta)), K**-0.5, state.to(dtype))


def token_oracle(c: Canonical) -> tuple[Tensor, Tensor]:
    """``(o, state)`` by the definition, in float64."""
    return recurrence(c.q, c.k, c.v, c.g, c.beta, c.state, c.scale)


def relative(a: Tensor, b: Tensor) -> float:
    """``||a - b|| / ||b||`` in float64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
