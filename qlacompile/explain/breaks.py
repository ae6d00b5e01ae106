"""Why torch broke the graph: the one place that reads Dynamo's own records of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_SKIPPED = re.compile(r"frame skipped: (.+)")


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """A list that holds, after the block, one readable reason for each graph break inside the block.

    A break inside a Python loop makes torch skip the whole function. That is in another of its records, and it is told
    here too: it is the most expensive kind.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    reasons: list[str] = []
    before = len(graph_break_reasons)
    known = dict(counters["unimplemented"])
    try:
        yield reasons
    finally:
        for entry in graph_break_reasons[before:]:
            frames = [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in entry.user_stack[-1:]]
            reasons.append("\n".join([entry.reason.strip(), *frames]))
        for text, count in counters["unimplemented"].items():
            skipped = _SKIPPED.search(text)
            if skipped and count > known.get(text, 0):
                cause = text.split("\n\n")[0].strip()
                reasons.append(f"{cause}\nin a loop, so all of {skipped.group(1)} runs eagerly")
