"""An access of a tensor at the loop index, and the exception that ends looking at a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .ir import Refusal


@dataclass(frozen=True)
class Indexed:
    """An access of invariant ``inv`` at the loop index: ``index`` with None-free entries; ``axis`` is where the
    index stands.

    Iteration ``i`` accesses position ``base + slope * i`` of that axis. ``position`` is where the axis would be in the
    result if it were kept; ``kept`` says that it is kept with length one (``x[t:t+1]``).
    """

    inv: int
    index: tuple[Any, ...]
    entry: int
    axis: int
    position: int
    base: int
    slope: int
    kept: bool


class Unfit(Exception):
    """The loop is not a step of the kind that patterns look at."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
