"""The test material itself: every zoo entry is Gated DeltaNet in plain eager code, and no near miss is."""

from __future__ import annotations

import pytest
import torch

from near_misses.hidden import HIDDEN
from near_misses.lookalike import LookAlike
from near_misses.lookalikes import LOOKALIKES
from near_misses.near_miss import NearMiss
from near_misses.neighbours import NEIGHBOURS
from zoo import chunk_loops, installed, token_algebra, token_control, token_loops
from zoo.models import MODELS, Model
from zoo.spelling import Canonical, Spelling, relative, token_oracle

SPELLINGS = tuple(s for m in (token_loops, token_algebra, token_control, chunk_loops, installed) for s in m.SPELLINGS)
NEAR_MISSES = (*NEIGHBOURS, *HIDDEN)


def test_names_are_unique() -> None:
    names = [s.name for s in (*SPELLINGS, *NEAR_MISSES, *LOOKALIKES)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_spelling_is_gated_delta_rule(spelling: Spelling) -> None:
    args = spelling.make(seed=1, dtype=torch.float64)
    want = spelling.reference(args)
    for got, expected in zip(spelling.outputs(spelling.fn(*args)), want):
        assert got.shape == expected.shape
        assert relative(got, expected) < (1e-5 if spelling.float32_inside else 1e-12)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s.grads], ids=lambda s: s.name)
def test_spelling_has_the_right_gradients(spelling: Spelling) -> None:
    args = tuple(a.requires_grad_() for a in spelling.make(seed=1, T=18, dtype=torch.float64))
    results = zip(spelling.outputs(spelling.fn(*args)), spelling.reference(args, detach=False))
    pairs = [[x.sin().sum() for x in pair] for pair in results]
    got, want = (torch.autograd.grad(sum(side), args) for side in zip(*pairs))
    for a, b in zip(got, want):
        assert relative(a, b) < (1e-4 if spelling.float32_inside else 1e-11)


@pytest.mark.parametrize("near", NEAR_MISSES, ids=lambda n: n.name)
def test_near_miss_is_something_else(near: NearMiss) -> None:
    args = near.make(seed=2, dtype=torch.float64)
    o, state = near.fn(*args)
    if near.legal:
        args = (*args[:3], torch.zeros_like(args[3]), *args[4:])
    wrong_o, wrong_state = near.nearest(args)
    difference = max(relative(o, wrong_o), relative(state, wrong_state))
    assert difference < 1e-12 if near.legal or near.same_value else difference > 5e-2


@pytest.mark.parametrize("near", [n for n in NEAR_MISSES if n.same_value], ids=lambda n: n.name)
def test_near_miss_has_another_gradient(near: NearMiss) -> None:
    args = tuple(a.requires_grad_() for a in near.make(seed=2, dtype=torch.float64))
    eager = torch.autograd.grad(sum(x.sin().sum() for x in near.fn(*args)), args, allow_unused=True)
    copies = tuple(a.detach().requires_grad_() for a in args)
    q, k, v, g, beta = copies
    state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    results = token_oracle(Canonical(q, k, v, g, beta, q.shape[-1] ** -0.5, state))
    wrong = torch.autograd.grad(sum(x.sin().sum() for x in results), copies)
    differences = [
        relative(w if e is None else e, torch.zeros_like(w) if e is None else w) for e, w in zip(eager, wrong)
    ]
    assert max(differences) > 5e-2


@pytest.mark.parametrize("case", LOOKALIKES, ids=lambda c: c.name)
def test_lookalike_runs_and_can_be_differentiated(case: LookAlike) -> None:
    args = [a.requires_grad_(case.grads) for a in case.make_args(seed=3, dtype=torch.float64)]
    outs = case.build()(*args)
    assert all(o.isfinite().all() for o in outs)
    if case.grads:
        assert torch.autograd.grad(sum(o.sum() for o in outs), args[2])[0].isfinite().all()


@pytest.mark.parametrize("case", [c for c in LOOKALIKES if c.rollable is False], ids=lambda c: c.name)
def test_lookalike_differs_from_the_plain_loop(case: LookAlike) -> None:
    """A compiler that believes the first iterations returns the plain loop's result; that has to be visible."""
    args = [a.requires_grad_(case.grads) for a in case.make_args(seed=3, dtype=torch.float64)]
    plain, got = LOOKALIKES[0].fn(*args), case.build()(*args)
    if case.name == "snapshot":  # differs only in what it returns besides
        assert len(got) == 3
    elif case.name in ("grad_mode_once", "truncated_gradient"):
        grads = [torch.autograd.grad(outs[0].sum(), args[2])[0] for outs in (got, plain)]
        assert relative(*grads) > 1e-2
    else:
        pairs = [(a, b) for a, b in zip(got, plain) if a.shape == b.shape]
        assert len(pairs) < 2 or max(relative(a, b) for a, b in pairs) > 1e-3


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_model_runs_and_trains(model: Model) -> None:
    module, x = model.build(), model.inputs(T=70)
    y = module(x)
    assert y.shape == x.shape
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert torch.equal(model.build()(x), y)  # the same weights each time
