"""What the commands write: results on stdout, progress on stderr, colour only where a person looks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

_COLOURS = {"good": "32", "bad": "31", "dim": "2", "bold": "1"}


class UsageError(Exception):
    """The command line asks for something that does not exist; the message says what to write instead."""


class Console:
    """In JSON mode only :meth:`document` writes to stdout."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def say(self, text: str = "") -> None:
        if not self.as_json:
            print(text, flush=True)

    def document(self, value: Any) -> None:
        if self.as_json:
            print(json.dumps(value, indent=2, default=str), flush=True)

    def error(self, message: str) -> None:
        if self.as_json:
            print(json.dumps({"error": message}), flush=True)
        else:
            print(f"{self.paint('error', 'bad', sys.stderr)}: {message}", file=sys.stderr, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as their content; the first is left-aligned, the others right."""
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        for number, row in enumerate([header, *rows]):
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
            line = "  ".join(cells).rstrip()
            self.say(self.paint(line, "bold") if number == 0 else line)

    def paint(self, text: str, style: str, stream: TextIO | None = None) -> str:
        if not _may_colour(stream or sys.stdout):
            return text
        return f"\033[{_COLOURS[style]}m{text}\033[0m"

    @contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """A clock that runs on a terminal; one plain line at the end elsewhere (logs, CI)."""
        start = time.perf_counter()
        stop = threading.Event()
        clock = threading.Thread(target=_tick, args=(what, start, stop), daemon=True)
        on_terminal = sys.stderr.isatty()
        if on_terminal:
            clock.start()
        try:
            yield
        finally:
            stop.set()
            if on_terminal:
                clock.join()
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            print(f"  {what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _may_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _tick(what: str, start: float, stop: threading.Event) -> None:
    while not stop.wait(0.2):
        print(f"\r\033[K  {what} ... {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)
