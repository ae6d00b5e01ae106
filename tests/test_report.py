"""The Report and how it is collected, without compiling anything."""

from __future__ import annotations

import json
import logging
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qlacompile.explain.collect import collecting, recorder
from qlacompile.explain.report import Report
from qlacompile.ir import Match, Proof, Refusal

MATCH = Match(
    family="gated_delta_rule",
    form="token",
    steps=128,
    source="model.py:12",
    roles={"q": "q_1", "state": "S"},
    kernel="reference",
    kernel_refusals=(("gdn_sm90", "QLA501", "found cpu, expected <sm90>"),),
    absorbed=("l2norm",),
    proof=Proof(1e-14, 3, "float64 evaluation", "S = a S + k u^T"),
)
REFUSAL = Refusal("QLA203", "reads with <p>, writes with k", "model.py:40", "comba", "recognise")


def _report() -> Report:
    with collecting() as collector, recorder() as rec:
        rec.add_graph(12)
        rec.add_match(MATCH)
        rec.add_refusal(REFUSAL)
        with rec.stage("prove"):
            pass
    return collector.report(("data-dependent branch\nat model.py:3 in f",))


def test_text_has_everything_a_person_needs() -> None:
    text = str(_report())
    for part in (
        "1 region matched",
        "model.py:12",
        "128 steps",
        "q = q_1",
        "reference",
        "QLA501",
        "found cpu",
        "l2norm",
    ):
        assert part in text
    for part in ("QLA203", "model.py:40", "comba", "graph break 1: data-dependent branch", "prove"):
        assert part in text


def test_empty_report_says_that_nothing_was_traced() -> None:
    assert "no graph reached the backend" in str(Report())


def test_dict_survives_json() -> None:
    report = _report()
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    assert report.to_dict()["matches"][0]["proof"]["trials"] == 3


class _Checker(HTMLParser):
    """Every element is closed, and nothing is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", [_report(), Report()], ids=["full", "empty"])
def test_html_is_well_formed_and_escaped(report: Report) -> None:
    page = report.to_html()
    checker = _Checker()
    checker.feed(page)
    assert not checker.open
    if report.matches:
        assert "&lt;sm90&gt;" in page and "&lt;p&gt;" in page


def test_save_chooses_by_suffix(tmp_path: Path) -> None:
    report = _report()
    assert report.save(tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads(report.save(tmp_path / "r.json").read_text())["graph_count"] == 1
    assert report.save(tmp_path / "r.txt").read_text() == f"{report}\n"


def test_collectors_nest_and_recorders_stay_apart() -> None:
    with collecting() as outer:
        recorder().add_match(MATCH)
        with collecting() as inner:
            rec = recorder()
            rec.add_match(MATCH)
    assert len(outer.matches) == 2
    assert len(inner.matches) == 1
    assert len(rec.report().matches) == 1
    recorder().add_match(MATCH)
    assert len(outer.matches) == 2


def test_a_repeated_refusal_is_told_once() -> None:
    with collecting() as collector:
        for _ in range(2):
            recorder().add_refusal(REFUSAL)
    assert collector.refusals == [REFUSAL]


def test_stage_is_timed_when_it_raises() -> None:
    rec = recorder()
    with pytest.raises(ZeroDivisionError), rec.stage("roll"):
        raise ZeroDivisionError
    assert "roll" in rec.report().seconds


def test_logging_tells_matches_and_refusals(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="qlacompile"):
        _report()
    assert any("matched gated_delta_rule" in m and "model.py:12" in m for m in caplog.messages)
    assert any("QLA203 at model.py:40" in m for m in caplog.messages)


def test_seconds_add_up() -> None:
    with collecting() as collector:
        rec = recorder()
        rec.add_seconds("rest", 1.0)
        rec.add_seconds("rest", 0.5)
    assert collector.report().seconds == {"rest": 1.5}
