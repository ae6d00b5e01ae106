"""Prove a recognised region: it and the operator's definition are run on random float64 data and must agree.

A token loop was proven by its pattern already, as a map of its state for all states; what is left here are regions over
whole sequences, which are compared token by token over their full length and in their final state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .core import core
from .evaluate import shape_of
from .ir import Placement, Proof, Refusal, SequenceMatch
from .recognise import Found, outputs_below, patterns
from .regions import evaluate

TOLERANCE = 1e-10
TRIALS = 2


def prove(found: Found, device: torch.device) -> Proof | Refusal:
    """The evidence, also finding the nodes that hold the final state; or QLA207 with the first difference."""
    pattern = next(p for p in patterns() if p.family == found.family)
    statement = pattern.statement(found.gate, found.roles.get("beta") is not None, found.scale)
    if found.region is None:
        assert found.proof is not None
        return replace(found.proof, statement=statement)
    if isinstance(_time(found), torch.SymInt):
        reason = "the length is symbolic, and a region over whole sequences is proven for one length"
        return Refusal("QLA209", reason, found.source, found.family, "prove")
    worst, flipped = 0.0, False
    candidates: list[tuple[fx.Node, bool]] | None = None
    match = found.match
    assert isinstance(match, SequenceMatch) and isinstance(found.output, Placement)
    needed = {at.key for at in found.roles.values()} | {found.output.key, found.state_in}
    below = set(found.region.below)
    elements = _state_elements(found)

    def keep(node: fx.Node) -> bool:
        return node in needed or (node in below and torch.Size(shape_of(node) or ()).numel() == elements)

    for trial in range(1, TRIALS + 1):
        values = evaluate(found.region, trial, False, device, keep)
        if trial == 1 and found.state_in is not None:
            flipped = _is_flipped(found, values)
        output, state = definition(found, values, flipped)
        actual = arrange(values[found.output.key], found.output, features=True)
        difference = per_token(actual, output)
        if difference > TOLERANCE:
            return Refusal(
                "QLA207",
                f"the output differs from the {found.family} of the same inputs by {difference:.1e} (relative)",
                found.source,
                found.family,
                "prove",
            )
        worst = max(worst, difference)
        states = [
            (node, transposed)
            for node, value in outputs_below(found, values)
            for transposed in (False, True)
            if _is_state(value, state, transposed)
        ]
        candidates = states if candidates is None else [c for c in candidates if c in states]
    _take_states(found, candidates or [])
    found.state_in_axes = (-1, -2) if flipped else (-2, -1)
    return Proof(worst, TRIALS, "the whole region on random float64 data, every token, random initial state", statement)


def _state_elements(found: Found) -> int:
    """How many numbers the state has."""
    match, at = found.match, found.roles["v"]
    assert isinstance(match, SequenceMatch)
    shape = shape_of(at.key) or ()
    batch = 1 if at.batch is None else shape[at.batch]
    heads = 1 if at.head is None else shape[at.head]
    return batch * heads * match.key_dim * match.value_dim


def _time(found: Found) -> Any:
    at = found.roles["v"]
    return at.key.meta["example_value"].shape[at.time]


def _is_flipped(found: Found, values: dict[fx.Node, Any]) -> bool:
    """Whether the initial state is given as ``[.., V, K]``; where K = V, the first outputs tell."""
    match, initial = found.match, values[found.state_in]
    assert isinstance(match, SequenceMatch) and isinstance(found.output, Placement)
    if match.key_dim != match.value_dim:
        return tuple(initial.shape[-2:]) == (match.value_dim, match.key_dim)
    actual = arrange(values[found.output.key], found.output, features=True)
    return per_token(actual, definition(found, values)[0]) > TOLERANCE


def _take_states(found: Found, candidates: list[tuple[fx.Node, bool]]) -> None:
    assert found.region is not None
    roles = {at.key for at in found.roles.values()} | ({found.state_in} if found.state_in is not None else set())
    # a node may equal the state on small numbers only, or cut its gradient: the way to it must be analytic, too
    candidates = [c for c in candidates if not isinstance(core(found.region, roles, [c[0]]), Refusal)]
    if candidates:
        transposed = candidates[0][1]
        found.state_axes = (-1, -2) if transposed else (-2, -1)
        found.state_out = [node for node, t in candidates if t == transposed]


def definition(found: Found, values: dict[fx.Node, Any], flipped: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The family's token recurrence on the roles' values: output ``[B, T, H, V]`` and state ``[B, H, K, V]``,
    float64."""
    match = found.match
    assert isinstance(match, SequenceMatch)
    data = {role: arrange(values[at.key], at, role in ("q", "k", "v")) for role, at in found.roles.items()}
    v = data["v"]
    ones = torch.ones(v.shape[:3], dtype=torch.float64, device=v.device)
    beta = data.get("beta", ones)
    alpha = ones
    if found.gate != "none":
        g = data["g"]
        alpha = {"log": torch.exp, "log2": torch.exp2, "neg_log": lambda x: torch.exp(-x), "linear": torch.clone}[
            found.gate
        ](g)
    q, k = data["q"] * found.scale, data["k"]
    batch, length, heads = v.shape[:3]
    shape = (batch, heads, match.key_dim, match.value_dim)
    state = torch.zeros(shape, dtype=torch.float64, device=v.device)
    if found.state_in is not None:
        initial = values[found.state_in]
        state = (initial.transpose(-1, -2) if flipped else initial).reshape(shape)
    outs = []
    for t in range(length):
        state = state * alpha[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 1), state


def arrange(x: torch.Tensor, at: Placement, features: bool) -> torch.Tensor:
    """A role's value as ``[B, T, H(, D)]``."""
    order = [d for d in (at.batch, at.time, at.head) if d is not None] + ([x.dim() - 1] if features else [])
    x = x.permute(order)
    x = x.unsqueeze(0) if at.batch is None else x
    return x if at.head is not None else x.unsqueeze(2)


def per_token(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative difference of any token and head, in the norm over the value axis."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    floor = size.amax() * 1e-30 + 1e-300
    worst = (difference / (size + floor)).max().item()
    return worst if worst == worst else float("inf")


def _is_state(value: torch.Tensor, state: torch.Tensor, transposed: bool) -> bool:
    expected = state.transpose(-1, -2) if transposed else state
    wanted = [s for s in expected.shape if s != 1]
    if [s for s in value.shape if s != 1] != wanted or value.shape[-2:] != expected.shape[-2:]:
        return False
    size = expected.abs().max().item()
    return bool((value.reshape(expected.shape) - expected).abs().max().item() <= TOLERANCE * 10 * size)
