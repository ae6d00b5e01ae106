"""Why torch broke the graph: the one place that reads Dynamo's own record of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """A list that holds, after the block, one readable reason for each graph break inside the block."""
    from torch._dynamo.utils import graph_break_reasons

    reasons: list[str] = []
    before = len(graph_break_reasons)
    try:
        yield reasons
    finally:
        for entry in graph_break_reasons[before:]:
            frames = [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in entry.user_stack[-1:]]
            reasons.append("\n".join([entry.reason.strip(), *frames]))
