"""The test material itself: every zoo entry is Gated DeltaNet in plain eager code, and no near miss is."""

from __future__ import annotations

import pytest
import torch

from zoo import token_algebra, token_control, token_loops
from zoo.spelling import Spelling, relative

TOKEN_SPELLINGS = (*token_loops.SPELLINGS, *token_algebra.SPELLINGS, *token_control.SPELLINGS)


def test_names_are_unique() -> None:
    names = [s.name for s in TOKEN_SPELLINGS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spelling", TOKEN_SPELLINGS, ids=lambda s: s.name)
def test_spelling_is_gated_delta_rule(spelling: Spelling) -> None:
    args = spelling.make(seed=1, dtype=torch.float64)
    want = spelling.reference(args)
    for got, expected in zip(spelling.outputs(spelling.fn(*args)), want):
        assert got.shape == expected.shape
        assert relative(got, expected) < 1e-12
