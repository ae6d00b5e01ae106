"""A Report as one HTML file that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..errors import CODES
from ..ir import Match, Refusal
from .report import Report
from .text import summary

_STYLE = """
:root { color-scheme: light dark; --edge: #8884; --yes: #2e8b57; --no: #c0661a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
article { border: 1px solid var(--edge); border-left: 4px solid var(--yes); border-radius: 4px; padding: .6rem 1rem;
  margin: .8rem 0; }
article.refusal { border-left-color: var(--no); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; }
dt { opacity: .7; } dd { margin: 0; } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; white-space: pre-wrap; } table { border-collapse: collapse; }
td, th { border: 1px solid var(--edge); padding: .15rem .6rem; text-align: left; } td.n { text-align: right; }
"""


def render(report: Report) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>qlacompile report</title><style>{_STYLE}</style></head><body>",
        f"<h1>qlacompile report</h1><p>{escape(summary(report))}</p>",
        _section("Matched regions", map(_match, report.matches)),
        _section("Refusals", map(_refusal, report.refusals)),
        _section("Graph breaks", (f"<pre>{escape(reason)}</pre>" for reason in report.break_reasons)),
        _seconds(report.seconds),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, bodies: Iterable[str]) -> str:
    body = "\n".join(bodies)
    return f"<h2>{title}</h2>\n{body}" if body else ""


def _match(m: Match) -> str:
    rows = [
        ("steps", escape(str(m.steps))),
        ("roles", "<br>".join(f"<code>{escape(role)} = {escape(name)}</code>" for role, name in m.roles.items())),
        ("scale", f"<code>{m.scale:.6g}</code>"),
        ("kernel", f"<code>{escape(m.kernel)}</code>"),
        ("other kernels", "<br>".join(escape(f"{k}: {code} {why}") for k, code, why in m.kernel_refusals)),
        ("absorbed", escape(", ".join(m.absorbed))),
        ("proof", escape(f"{m.proof.method}, {m.proof.trials} trials, largest relative error {m.proof.error:.1e}")),
        ("statement", f"<pre>{escape(m.proof.statement)}</pre>" if m.proof.statement else ""),
    ]
    return _article("match", f"{m.family}, {m.form} form", m.source, rows)


def _refusal(r: Refusal) -> str:
    rows = [
        ("meaning", escape(CODES[r.code])),
        ("reason", escape(r.reason)),
        ("nearest family", escape(r.nearest_family or "")),
        ("stage", escape(r.stage)),
    ]
    return _article("refusal", r.code, r.source, rows)


def _article(kind: str, title: str, source: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    where = f" <code>{escape(source)}</code>" if source else ""
    return f'<article class="{kind}"><strong>{escape(title)}</strong>{where}<dl>{body}</dl></article>'


def _seconds(seconds: dict[str, float]) -> str:
    if not seconds:
        return ""
    rows = "".join(f'<tr><td>{escape(s)}</td><td class="n">{t:.3f}</td></tr>' for s, t in seconds.items())
    return f"<h2>Seconds</h2><table><tr><th>stage</th><th>seconds</th></tr>{rows}</table>"
