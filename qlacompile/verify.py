"""``flashqla.verify="once"``: on the first call also run the graph as it was, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .errors import StrictError

# relative difference in the norm that reordering and the precision of the inputs explain, with a wide margin
BUDGET = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def once(compiled: Callable[..., Any], original: fx.GraphModule) -> Callable[..., Any]:
    """``compiled``, checked against ``original`` on its first call. Raises StrictError QLA003 on a difference.

    The check runs without gradients, on copies of the inputs, and costs one eager call; random operations in the graph
    draw other numbers in it and are reported as a difference.
    """
    checked = False

    def run(*args: Any) -> Any:
        nonlocal checked
        if checked:
            return compiled(*args)
        checked = True
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        with torch.no_grad():
            expected = original(*copies)
        got = compiled(*args)
        for number, (mine, theirs) in enumerate(zip(_flat(got), _flat(expected))):
            difference = _difference(mine, theirs)
            if difference > BUDGET.get(theirs.dtype, 0.0):
                raise StrictError(
                    "QLA003",
                    f"flashqla.verify: output {number} differs from the eager graph by {difference:.1e} (relative), "
                    f"expected at most {BUDGET.get(theirs.dtype, 0.0):.0e} for {theirs.dtype}; please report it, and "
                    "set flashqla.kernels=['reference'] to see whether a kernel is at fault",
                )
        return got

    return run


def _flat(value: Any) -> list[torch.Tensor]:
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else [value]


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(mine, theirs) else float("inf")
    a, b = mine.detach().double(), theirs.double()
    size = b.norm()
    distance = (a - b).norm()
    return float(distance / size) if size > 0 else float(distance)
