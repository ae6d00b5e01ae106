"""Where the stages say what they did.

The backend opens one Recorder a compile. What it records goes to every open Collector (``qlacompile.explain`` opens
one), to Python logging, and, when torch is tracing (TORCH_TRACE), to an artifact ``qlacompile_report``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from ..ir import Match, Refusal
from .report import Report

log = logging.getLogger("qlacompile")

# Compiles run in the thread that called the compiled function, so a context variable reaches from explain() to the
# backend, and two threads that explain at the same time do not mix their reports.
_active: ContextVar[tuple[Collector, ...]] = ContextVar("qlacompile_collectors", default=())


class Collector:
    """Everything recorded while it is open. A refusal that is said twice (a retraced frame) is kept once."""

    def __init__(self) -> None:
        self.matches: list[Match] = []
        self.refusals: list[Refusal] = []
        self.seconds: dict[str, float] = {}
        self.node_counts: list[int] = []

    def report(self, break_reasons: tuple[str, ...] = ()) -> Report:
        return Report(
            matches=tuple(self.matches),
            refusals=tuple(self.refusals),
            graph_count=len(self.node_counts),
            graph_break_count=len(break_reasons),
            break_reasons=break_reasons,
            seconds={stage: round(s, 6) for stage, s in self.seconds.items()},
            node_counts=tuple(self.node_counts),
        )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Open a Collector. They nest: an inner one does not hide anything from an outer one."""
    collector = Collector()
    token = _active.set((*_active.get(), collector))
    try:
        yield collector
    finally:
        _active.reset(token)


class Recorder:
    """What one compile did. Use it as a context manager, or call :meth:`close`: that writes the trace artifact."""

    def __init__(self) -> None:
        self._own = Collector()
        self._sinks = (self._own, *_active.get())

    def add_match(self, match: Match) -> None:
        for sink in self._sinks:
            sink.matches.append(match)
        log.info(
            "matched %s (%s, %d steps) at %s -> kernel %s",
            match.family,
            match.form,
            match.steps,
            match.source or "unknown source",
            match.kernel,
        )

    def add_refusal(self, refusal: Refusal) -> None:
        if refusal in self._own.refusals:
            return
        for sink in self._sinks:
            if refusal not in sink.refusals:
                sink.refusals.append(refusal)
        log.info("refused %s", refusal)

    def add_seconds(self, stage: str, seconds: float) -> None:
        for sink in self._sinks:
            sink.seconds[stage] = sink.seconds.get(stage, 0.0) + seconds
        log.debug("stage %s took %.3f s", stage, seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; it is recorded also when the stage raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(name, time.perf_counter() - start)

    def add_graph(self, node_count: int) -> None:
        """Dynamo handed over one more graph, of ``node_count`` nodes."""
        for sink in self._sinks:
            sink.node_counts.append(node_count)

    def report(self) -> Report:
        """What this compile alone did."""
        return self._own.report()

    def close(self) -> None:
        """Write the artifact for torch's structured trace. Costs nothing when torch is not tracing."""
        try:
            from torch._logging import trace_structured

            trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": "qlacompile_report", "encoding": "json"},
                payload_fn=lambda: self.report().to_json(),
            )
        except Exception as error:  # a private API of torch, and a report must never break a compile
            log.debug("no structured trace: %s", error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def recorder() -> Recorder:
    """A Recorder for one compile, which also feeds the Collectors that are open now."""
    return Recorder()
