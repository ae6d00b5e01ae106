"""The gated delta rule: what it is, found in a step or in a whole sequence by what is computed.

The maths is in README.md beside this file. Here it is only used: a step is S' = M S + N with M = a (I - b k k^T) and
N = b k v^T, and reads o = s S'^T q.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from qlacompile.ir import Placement, Refusal, SequenceMatch, SequenceView, StepMatch, StepView, Value

from .affine import Affine, aligned, close, constant, decompose, error, orientations, ratio
from .statement import sentence

FAMILY = "gated_delta_rule"
TRIALS = 3
GATES = {
    "log": torch.exp,
    "linear": lambda x: x,
    "log2": torch.exp2,
    "neg_log": lambda x: torch.exp(-x),
}


class GatedDeltaRule:
    """The pattern. ``match_step`` and ``match_sequence`` return roles, or the first condition that fails."""

    family = FAMILY

    def statement(self, gate: str, has_beta: bool, scale: float) -> str:
        return sentence(gate, has_beta, scale)

    def match_step(self, view: StepView) -> StepMatch | Refusal:
        refusal = Refusal("QLA202", "the new state is not an affine function of the old one", nearest_family=FAMILY)
        for key_axis, value_axis in orientations(len(view.state_shape)):
            if view.state_shape[key_axis] < 2:
                continue
            found = self._match_oriented(view, key_axis, value_axis)
            if isinstance(found, StepMatch):
                return found
            if _order(found) > _order(refusal):
                refusal = found
        return refusal

    def _match_oriented(self, view: StepView, key_axis: int, value_axis: int) -> StepMatch | Refusal:
        step = decompose(view, 0, key_axis, value_axis)
        if step is None:
            return Refusal("QLA202", "the new state is not an affine function of the old one", nearest_family=FAMILY)
        values = view.values(0)
        parts = _transition(step)
        if isinstance(parts, Refusal):
            return _name_neighbour(step, values) or parts
        alpha, rank_one = parts
        found = _roles(step, alpha, rank_one, values)
        if isinstance(found, Refusal):
            return found
        roles, gate, scale, output = found
        worst = 0.0
        for trial in range(TRIALS):
            again = decompose(view, trial, key_axis, value_axis)
            if again is None:
                return Refusal("QLA207", "a second trial is not affine in the state", nearest_family=FAMILY)
            by_key = {v.key: v.data for v in view.values(trial)}
            difference = _check(again, {r: by_key[k] for r, k in roles.items() if k is not None}, gate, scale, output)
            if difference is None or difference > 1e-10:
                shown = "shapes" if difference is None else f"a relative difference of {difference:.1e}"
                return Refusal(
                    "QLA207", f"the roles found in one trial fail in another ({shown})", nearest_family=FAMILY
                )
            worst = max(worst, difference)
        return StepMatch(FAMILY, key_axis, value_axis, roles, gate, scale, output, worst)

    def match_sequence(self, view: SequenceView) -> SequenceMatch | Refusal:
        best = Refusal("QLA206", "no value has the layout of a value sequence", nearest_family=FAMILY)
        for found in _sequence_candidates(view):
            if isinstance(found, SequenceMatch):
                return found
            best = found
        return best


PATTERN = GatedDeltaRule()


def _order(refusal: Refusal) -> int:
    """How far the search came before this refusal; the furthest one says most."""
    return ("QLA202", "QLA203", "QLA206", "QLA204", "QLA207").index(refusal.code)


# --- one step ---------------------------------------------------------------------------------------------------------


def _transition(step: Affine) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
    """``a`` ``[N]`` and ``R = a b k k^T`` ``[N, K, K]`` of M = a I - R, or why M is not of that form."""
    m = step.transition
    keys = m.shape[-1]
    if not close(m, m.transpose(-1, -2)):
        return Refusal("QLA202", "the state's transition is not symmetric (it reads with another key than it writes)")
    eigenvalues = torch.linalg.eigvalsh(m)
    candidates = [eigenvalues[:, keys // 2]] if keys > 2 else [eigenvalues[:, 1], eigenvalues[:, 0]]
    for alpha in candidates:
        r = alpha[:, None, None] * torch.eye(keys, dtype=m.dtype, device=m.device) - m
        if close(r, torch.zeros_like(r), 1e-12) or r.abs().max() <= 1e-12 * m.abs().max():
            return Refusal("QLA203", "the state is decayed but never corrected (no delta term): gated linear attention")
        column = r.abs().sum(-1).argmax(-1)
        u = r[torch.arange(len(r)), :, column]
        denominator = u[torch.arange(len(r)), column]
        if bool((denominator.abs() > 0).all()) and close(u[:, :, None] * u[:, None, :] / denominator[:, None, None], r):
            return alpha, r
    return Refusal("QLA202", "the state's transition is not a scalar times (identity minus one outer product)")


def _roles(
    step: Affine, alpha: torch.Tensor, rank_one: torch.Tensor, values: list[Value]
) -> tuple[dict[str, Any], str, float, int | None] | Refusal:
    """Which values are k, beta, v, the gate and q. Several k (scaled copies) may fit; all must then be found."""
    keys, width = step.write.shape[1:]
    vectors = [(v.key, a) for v in values if (a := aligned(v.data, step.batch, keys)) is not None]
    targets = [(v.key, a) for v in values if (a := aligned(v.data, step.batch, width)) is not None]
    scalars = [(v.key, a) for v in values if (a := aligned(v.data, step.batch, None)) is not None]
    column = rank_one.abs().sum(-1).argmax(-1)
    u = rank_one[torch.arange(len(rank_one)), :, column]
    gate = _gate(alpha, scalars)
    if gate is None:
        return Refusal("QLA206", "the decay of the state is not the exponential of, nor equal to, a value of the step")
    missing = "no value of the step is parallel to the key of the transition"
    for k_key, k in vectors:
        if ratio(u, k) is None:
            continue
        norm = (k * k).sum(-1)
        beta = rank_one.diagonal(dim1=-2, dim2=-1).sum(-1) / (alpha * norm)
        ones = torch.ones_like(beta)
        beta_key = None
        if not close(beta, ones):
            beta_key = next((key for key, b in scalars if close(b, beta)), None)
            if beta_key is None:
                if close(beta * alpha, _nearest(beta * alpha, scalars)):
                    missing = "the error is taken before the decay (the transition is a I - b k k^T)"
                else:
                    missing = "the strength of the write (beta) is not a value of the step"
                continue
        v = (step.write * k[:, :, None]).sum(1) / (beta * norm)[:, None]
        if not close(k[:, :, None] * (beta[:, None] * v)[:, None, :], step.write):
            missing = "what is written is not along the key"
            continue
        v_key = next((key for key, t in targets if close(t, v)), None)
        if v_key is None:
            missing = "the value that is written is not a value of the step"
            continue
        roles = {"k": k_key, "v": v_key, "g": gate[0], "beta": beta_key}
        read = _read(step, vectors)
        if isinstance(read, Refusal):
            return read
        q_key, scale, output = read
        return {**roles, "q": q_key}, gate[1], scale, output
    return Refusal("QLA206", missing, nearest_family=FAMILY)


def _nearest(wanted: torch.Tensor, scalars: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    return min((s for _, s in scalars), key=lambda s: error(s, wanted), default=torch.zeros_like(wanted))


def _gate(alpha: torch.Tensor, scalars: list[tuple[Any, torch.Tensor]]) -> tuple[Any, str] | None:
    if close(alpha, torch.ones_like(alpha)):
        return None, "none"
    for name, fn in GATES.items():
        for key, value in scalars:
            if close(fn(value), alpha):
                return key, name
    return None


def _read(step: Affine, vectors: list[tuple[Any, torch.Tensor]]) -> tuple[Any, float, int | None] | Refusal:
    """q, its scale and the number of the output that reads the new state with it."""
    refusal = Refusal("QLA204", "no output reads the state with a value of the step", nearest_family=FAMILY)
    for out in step.outputs:
        if not bool(out.weights.abs().max() > 0):
            continue
        w = torch.linalg.solve(step.transition.transpose(-1, -2), out.weights)
        if not close((step.write * w[:, :, None]).sum(1), out.offset):
            refusal = Refusal("QLA204", "the output does not read the updated state", nearest_family=FAMILY)
            continue
        for key, q in vectors:
            c = ratio(w, q)
            scale = None if c is None else constant(c)
            if scale is not None:
                return key, scale, out.index
    return refusal


def _check(step: Affine, roles: dict[str, torch.Tensor], gate: str, scale: float, output: int | None) -> float | None:
    """The largest relative difference between the step and the family's formula with these roles."""
    keys, width = step.write.shape[1:]
    k, v = aligned(roles["k"], step.batch, keys), aligned(roles["v"], step.batch, width)
    q = aligned(roles["q"], step.batch, keys)
    alpha: torch.Tensor | None = torch.ones(len(step.write), dtype=torch.float64, device=step.write.device)
    beta = alpha
    if gate != "none":
        g = aligned(roles["g"], step.batch, None)
        alpha = GATES[gate](g) if g is not None else None
    if "beta" in roles:
        beta = aligned(roles["beta"], step.batch, None)
    if k is None or v is None or q is None or alpha is None or beta is None:
        return None
    outer = k[:, :, None] * k[:, None, :]
    m = alpha[:, None, None] * (torch.eye(keys, dtype=k.dtype, device=k.device) - beta[:, None, None] * outer)
    n = beta[:, None, None] * k[:, :, None] * v[:, None, :]
    worst = max(error(step.transition, m), error(step.write, n))
    out = next((o for o in step.outputs if o.index == output), None)
    if out is None:
        return None
    w = scale * (m.transpose(-1, -2) @ q[:, :, None])[:, :, 0]
    return max(worst, error(out.weights, w), error(out.offset, scale * (n * q[:, :, None]).sum(1)))


def _name_neighbour(step: Affine, values: list[Value]) -> Refusal | None:
    """A refusal that says which known neighbour this is."""
    m = step.transition
    keys = m.shape[-1]
    eye = torch.eye(keys, dtype=m.dtype, device=m.device)
    diagonal = torch.diagonal(m, dim1=-2, dim2=-1)
    if close(m, torch.diag_embed(diagonal)):
        return Refusal("QLA203", "each key channel decays by itself and nothing is corrected: gated linear attention")
    for value in values:
        d = aligned(value.data, step.batch, keys)
        if d is None:
            continue
        for decay in (torch.exp(d), d):
            rest = eye - m / decay[:, None, :]
            if close(rest, rest.transpose(-1, -2)) and _rank(rest) == 1:
                return Refusal(
                    "QLA203", "the decay differs between key channels: Kimi delta attention", nearest_family="kda"
                )
    alpha = torch.linalg.eigvals(m).real.median(-1).values
    rank = _rank(alpha[:, None, None] * eye - m) if keys > 3 else 0
    if rank == 1:
        return Refusal(
            "QLA203", "the key that reads the state is not the key that writes it: Comba", nearest_family="comba"
        )
    if rank == 2 and keys > 4:
        return Refusal("QLA203", "two delta updates a step: Gated DeltaProduct", nearest_family="gated_delta_product")
    return None


def _rank(m: torch.Tensor) -> int:
    s = torch.linalg.svdvals(m)
    return int((s > 1e-9 * s.amax(-1, keepdim=True)).sum(-1).max())


# --- a whole sequence -------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, steps: int
) -> torch.Tensor:
    """The first ``steps`` outputs of the recurrence from a zero state; ``[B, T, H, ...]``, decay ``alpha`` in linear
    space."""
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=torch.float64, device=k.device)
    outs = []
    for t in range(min(steps, k.shape[1])):
        state = state * alpha[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 1)


_LAYOUTS: dict[int, tuple[tuple[int | None, int, int | None], ...]] = {
    # rank without the feature axis -> (batch, time, head)
    3: ((0, 2, 1), (0, 1, 2)),
    2: ((0, 1, None), (None, 1, 0), (None, 0, 1)),
    1: ((None, 0, None),),
}


def _arrange(x: torch.Tensor, layout: tuple[int | None, int, int | None], features: int) -> torch.Tensor:
    """``[B, T, H(, D)]``"""
    batch, time, head = layout
    order = [d for d in (batch, time, head) if d is not None] + ([x.dim() - 1] if features else [])
    x = x.permute(order)
    if batch is None:
        x = x.unsqueeze(0)
    return x if head is not None else x.unsqueeze(2)


def _arrangements(
    values: list[Value], sizes: tuple[int, int, int], features: int
) -> Iterator[tuple[Placement, torch.Tensor]]:
    """Every way to read a value as ``[B, T, H(, D)]`` of these sizes, later values first."""
    for value in reversed(values):
        for layout in _LAYOUTS.get(value.data.dim() - features, ()):
            arranged = _arrange(value.data, layout, features)
            if tuple(arranged.shape[:3]) == sizes:
                yield Placement(value.key, *layout), arranged


def _unique(found: Iterator[tuple[Placement, torch.Tensor]]) -> list[tuple[Placement, torch.Tensor]]:
    """One of each distinct value: the last node that holds it."""
    kept: list[tuple[Placement, torch.Tensor]] = []
    for placement, data in found:
        if not any(data.shape == other.shape and _same(data, other) for _, other in kept):
            kept.append((placement, data))
    return kept


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a[:, :3] == b[:, :3]).all()) and bool((a[:, -1] == b[:, -1]).all())


def _sequence_candidates(view: SequenceView) -> Iterator[SequenceMatch | Refusal]:
    outputs = []
    for value in view.outputs:
        for layout in _LAYOUTS.get(value.data.dim() - 1, ()):
            arranged = _arrange(value.data, layout, 1)
            outputs.append((arranged.shape[1], Placement(value.key, *layout), arranged))
    # For each length the first node that has it; of these the last one first: that is the whole sequence (chunks come
    # before it) without its padding (which is cut off after it).
    first: dict[int, int] = {}
    for position, (length, _, _) in enumerate(outputs):
        first.setdefault(length, position)
    for length, placement, out in sorted(outputs, key=lambda o: -first[o[0]]):
        if length < 2:
            continue
        sizes = (out.shape[0], out.shape[1], out.shape[2])
        targets = [
            (p, v)
            for p, v in _unique(_arrangements(view.inputs, sizes, 1))
            if v.shape[-1] == out.shape[-1] and ratio(out[:, 0].flatten(0, 1), v[:, 0].flatten(0, 1)) is not None
        ]
        if not targets:
            continue
        yield _assign(view, placement, out, sizes, targets)


def _assign(
    view: SequenceView,
    placement: Placement,
    out: torch.Tensor,
    sizes: tuple[int, int, int],
    targets: list[tuple[Placement, torch.Tensor]],
) -> SequenceMatch | Refusal:
    """Roles from the first outputs: o_0 = s b_0 (k_0 . q_0) v_0 fixes v, beta, the pair (q, k) and s; o_1.. fix the
    rest."""
    vectors = [(p, x) for p, x in _unique(_arrangements(view.inputs, sizes, 1)) if x.shape[-1] >= 2]
    scalars = _unique(_arrangements(view.inputs, sizes, 0))
    ones = torch.ones(sizes, dtype=torch.float64, device=out.device)
    betas: list[tuple[Placement | None, torch.Tensor]] = [*scalars, (None, ones)]
    steps = min(4, sizes[1])
    for (v_at, v), (q_at, q), (k_at, k) in product(targets, vectors, vectors):
        if q.shape[-1] != k.shape[-1]:
            continue
        r = ratio(out[:, 0].flatten(0, 1), v[:, 0].flatten(0, 1))
        dot = (q[:, 0] * k[:, 0]).sum(-1).flatten()
        if r is None or not bool((dot.abs() > 1e-12).all()):
            continue
        for b_at, beta in betas:
            scale = constant(r / (dot * beta[:, 0].flatten()))
            if scale is None:
                continue
            gates: list[tuple[Placement | None, str, torch.Tensor]] = [(None, "none", ones)]
            gates += [(p, name, fn(g)) for p, g in scalars for name, fn in GATES.items()]
            for g_at, name, alpha in gates:
                if close(scale * reference(q, k, v, alpha, beta, steps), out[:, :steps], 1e-9):
                    roles = {"q": q_at, "k": k_at, "v": v_at, "g": g_at, "beta": b_at}
                    return SequenceMatch(
                        FAMILY,
                        {role: at for role, at in roles.items() if at is not None},
                        placement,
                        name,
                        scale,
                        k.shape[-1],
                        v.shape[-1],
                    )
    return Refusal("QLA206", "no assignment of q, k, beta and gate gives the first outputs", nearest_family=FAMILY)
