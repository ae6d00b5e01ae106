"""The test material itself: every zoo entry is Gated DeltaNet in plain eager code, and no near miss is."""

from __future__ import annotations

import pytest
import torch

from zoo import chunk_loops, installed, token_algebra, token_control, token_loops
from zoo.spelling import Spelling, relative

SPELLINGS = tuple(s for m in (token_loops, token_algebra, token_control, chunk_loops, installed) for s in m.SPELLINGS)


def test_names_are_unique() -> None:
    names = [s.name for s in SPELLINGS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_spelling_is_gated_delta_rule(spelling: Spelling) -> None:
    args = spelling.make(seed=1, dtype=torch.float64)
    want = spelling.reference(args)
    for got, expected in zip(spelling.outputs(spelling.fn(*args)), want):
        assert got.shape == expected.shape
        assert relative(got, expected) < (1e-5 if spelling.float32_inside else 1e-12)
