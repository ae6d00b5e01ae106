"""qlacompile.explain end to end: what it reports, and that it leaves the user's own compiled code alone."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

import qlacompile
from qlacompile.errors import OptionError, StrictError
from zoo.token_loops import SPELLINGS, list_stack

ARGS = SPELLINGS[0].make(T=20)


def test_a_token_loop_is_reported() -> None:
    report = qlacompile.explain(list_stack)(*ARGS)
    (match,) = report.matches
    assert (match.family, match.form, match.steps) == ("gated_delta_rule", "token", 20)
    assert "token_loops.py:" in match.source
    assert set(match.roles) >= {"q", "k", "v", "g", "beta"}
    assert match.kernel == "reference"
    assert {kernel for kernel, _, _ in match.kernel_refusals} == {"gdn_sm90"}
    assert match.proof.error < 1e-10
    assert (report.graph_count, report.graph_break_count) == (1, 0)
    assert report.seconds


def test_keyword_arguments_and_modules() -> None:
    class Model(torch.nn.Module):
        def forward(self, *, q, rest):
            return list_stack(q, *rest)

    assert len(qlacompile.explain(Model())(q=ARGS[0], rest=ARGS[1:]).matches) == 1


def test_explaining_twice_says_the_same() -> None:
    first, second = (qlacompile.explain(list_stack)(*ARGS) for _ in range(2))
    assert first.matches == second.matches
    assert first.graph_count == second.graph_count


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="this torch can not keep them apart"
)
def test_compiled_code_of_the_user_stays() -> None:
    compiles = []

    def counting(gm, example_inputs):
        compiles.append(gm)
        return gm.forward

    fast = torch.compile(list_stack, backend=counting)
    fast(*ARGS)
    qlacompile.explain(list_stack)(*ARGS)
    fast(*ARGS)
    assert len(compiles) == 1


def test_what_is_compiled_already_is_explained_too() -> None:
    options = {"flashqla.rest": "eager"}
    torch.compile(list_stack, backend="flashqla", options=options)(*ARGS)
    assert len(qlacompile.explain(list_stack, options=options)(*ARGS).matches) == 1


def test_a_mode_is_accepted() -> None:
    assert len(qlacompile.explain(list_stack, mode="max-autotune")(*ARGS).matches) == 1


def test_graph_breaks_have_reasons_and_places() -> None:
    def broken(*args):
        o, _ = list_stack(*args)
        torch._dynamo.graph_break()
        return o + list_stack(*args)[0]

    report = qlacompile.explain(broken)(*ARGS)
    assert (report.graph_count, report.graph_break_count) == (2, 1)
    assert "graph_break" in report.break_reasons[0]
    assert "test_explain.py" in report.break_reasons[0]
    assert len(report.matches) == 2


def test_a_break_in_a_loop_is_told_although_nothing_was_compiled() -> None:
    def broken(*args):
        for _ in range(2):
            torch._dynamo.graph_break()
        return list_stack(*args)

    report = qlacompile.explain(broken)(*ARGS)
    assert any("runs eagerly" in reason and "broken" in reason for reason in report.break_reasons)


def test_options_reach_the_backend() -> None:
    with pytest.raises(OptionError, match="QLA001"):
        qlacompile.explain(list_stack, options={"flashqla.nonsense": 1})(*ARGS)
    with pytest.raises(StrictError, match="QLA003"):
        qlacompile.explain(torch.sin, options={"flashqla.strict": True})(ARGS[0])


def test_backend_is_not_an_argument() -> None:
    with pytest.raises(TypeError, match="backend"):
        qlacompile.explain(list_stack, backend="inductor")


def test_one_log_line_for_a_match(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="qlacompile"):
        qlacompile.explain(list_stack)(*ARGS)
    assert sum("matched gated_delta_rule" in message for message in caplog.messages) == 1


def test_structured_trace_has_the_report() -> None:
    seen: list[dict[str, object]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(dict(getattr(record, "metadata", {}) or {}))

    trace = logging.getLogger("torch.__trace")
    handler = Handler()
    trace.addHandler(handler)
    try:
        qlacompile.explain(list_stack)(*ARGS)
    finally:
        trace.removeHandler(handler)
    if seen:  # torch's trace is on only where its private logger has a handler of its own kind
        assert any((m.get("artifact") or {}).get("name") == "qlacompile_report" for m in seen)
