"""The value that says what was compiled to a fused kernel, what was not, and why not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..ir import Match, Refusal


@dataclass(frozen=True)
class Report:
    """What the backend did during one or more compiles. ``str(report)`` is for people, ``to_dict()`` for programs."""

    matches: tuple[Match, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    graph_count: int = 0
    graph_break_count: int = 0
    break_reasons: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    node_counts: tuple[int, ...] = ()

    def __str__(self) -> str:
        from .text import render

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, in the order of the fields."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        from .html import render

        return render(self)

    def save(self, path: str | Path) -> Path:
        """Write the report; the suffix chooses the form: ``.html``, ``.json``, anything else is text."""
        path = Path(path)
        suffix = path.suffix.lower()
        text = self.to_html() if suffix in (".html", ".htm") else self.to_json() if suffix == ".json" else f"{self}\n"
        path.write_text(text, encoding="utf-8")
        return path
