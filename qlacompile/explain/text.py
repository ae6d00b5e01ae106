"""A Report for people, as plain text."""

from __future__ import annotations

from ..ir import Match, Refusal
from .report import Report


def render(report: Report) -> str:
    return "\n".join(lines(report))


def summary(report: Report) -> str:
    """One line: what was found."""
    nodes = f" ({', '.join(map(str, report.node_counts))} nodes)" if report.node_counts else ""
    return (
        f"{_count(len(report.matches), 'region')} matched, {_count(len(report.refusals), 'refusal')}, "
        f"{_count(report.graph_count, 'graph')}{nodes}, {_count(report.graph_break_count, 'graph break')}"
    )


def lines(report: Report) -> list[str]:
    out = [f"qlacompile: {summary(report)}"]
    for number, match in enumerate(report.matches, 1):
        out += _match(number, match)
    for number, refusal in enumerate(report.refusals, 1):
        out += _refusal(number, refusal)
    for number, reason in enumerate(report.break_reasons, 1):
        first, *more = reason.splitlines() or [""]
        out += [f"graph break {number}: {first}", *(f"  {line}" for line in more)]
    if report.graph_count == 0:
        out += [
            "no graph reached the backend: torch gave up on tracing this function (TORCH_LOGS=graph_breaks says why)"
        ]
    if report.seconds:
        out += ["seconds: " + ", ".join(f"{stage} {s:.3f}" for stage, s in report.seconds.items())]
    return out


def _match(number: int, m: Match) -> list[str]:
    out = [
        f"match {number}: {m.family}, {m.form} form, {_count(m.steps, 'step')}, at {m.source or 'unknown source'}",
        f"  roles:  {', '.join(f'{role} = {name}' for role, name in m.roles.items())}",
        f"  scale:  {m.scale:.6g}",
        f"  kernel: {m.kernel}",
    ]
    out += [f"  not {kernel}: {code} {reason}" for kernel, code, reason in m.kernel_refusals]
    if m.absorbed:
        out += [f"  absorbed: {', '.join(m.absorbed)}"]
    proof = f"  proof:  {m.proof.method}, {_count(m.proof.trials, 'trial')}, largest relative error {m.proof.error:.1e}"
    out += [proof]
    if m.proof.statement:
        out += [f"    {line}" for line in m.proof.statement.splitlines()]
    return out


def _refusal(number: int, r: Refusal) -> list[str]:
    stage = f" [{r.stage}]" if r.stage else ""
    out = [f"refusal {number}: {r.code}{stage} at {r.source or 'unknown source'}", f"  {r.reason}"]
    if r.nearest_family:
        out += [f"  nearest family: {r.nearest_family}"]
    return out


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
