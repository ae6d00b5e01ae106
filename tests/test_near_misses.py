"""Nothing that is not Gated DeltaNet is rewritten as it, and every loop keeps its values and gradients."""

from __future__ import annotations

import pytest
import torch

from compiled import compile_and_run, run, worst
from near_misses.hidden import HIDDEN
from near_misses.lookalike import LookAlike
from near_misses.lookalikes import LOOKALIKES
from near_misses.near_miss import NearMiss
from near_misses.neighbours import NEIGHBOURS


@pytest.mark.parametrize("miss", [*NEIGHBOURS, *HIDDEN], ids=lambda m: m.name)
def test_neighbour_is_refused_with_its_reason(miss: NearMiss) -> None:
    args = miss.make(seed=3)
    got = compile_and_run(miss.fn, args)
    eager = run(miss.fn, args)
    assert got.report is not None
    if miss.legal:
        assert len(got.report.matches) == 1, "\n".join(map(str, got.report.refusals))
        assert max(worst(got.outputs, eager.outputs), worst(got.grads, eager.grads)) <= 2e-5
        return
    assert not got.report.matches
    assert {r.code for r in got.report.refusals} & miss.codes, "\n".join(map(str, got.report.refusals))
    assert worst(got.outputs, eager.outputs) <= 1e-6
    assert worst(got.grads, eager.grads) <= 1e-5


@pytest.mark.parametrize("rest", ["eager"])
@pytest.mark.parametrize("case", LOOKALIKES, ids=lambda c: c.name)
def test_lookalike_keeps_its_value(case: LookAlike, rest: str) -> None:
    args = case.make_args(seed=5)
    torch.manual_seed(1)
    eager = run(case.build(), args, grad=case.grads and not case.mutates)
    torch.manual_seed(1)
    got = compile_and_run(case.build(), args, grad=case.grads and not case.mutates, rest=rest, fullgraph=False)
    bound = 2e-5 if got.report and got.report.matches else 1e-6
    assert worst(got.outputs, eager.outputs) <= bound
    assert worst(got.grads, eager.grads) <= 2e-5
    if got.report and got.report.matches and case.rollable is False and not case.gdn:
        # a loop that was unrolled may hold regular stretches; one of them is never the whole loop
        assert all(match.steps < args[0].shape[1] for match in got.report.matches)
