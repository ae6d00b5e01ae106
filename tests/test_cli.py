"""The command line: exit codes, JSON documents, and messages that say what to write instead."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch

from qlacompile import demo
from qlacompile.cli import main
from qlacompile.commands import console, doctor
from qlacompile.commands.console import Console

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ["q=1,20,2,8", "k=1,20,2,8", "v=1,20,2,8", "g=1,20,2:float32:-1:0", "beta=1,20,2:float32:0:1"]
LOOP = f"{ROOT / 'tests' / 'zoo' / 'token_loops.py'}:list_stack"


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_finds_the_portable_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = _json(capsys, "doctor")
    assert found["kernels"]["reference"] is None
    assert found["versions"]["torch"]["found"] == torch.__version__
    if not torch.cuda.is_available():
        assert found["kernels"]["gdn_sm90"].startswith("QLA501")


def test_doctor_is_readable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_probe_import", lambda module: "not installed")
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert "rolling of loops" in text and "gdn_sm90" in text
    assert ("all well" in text) == (code == 0)


def test_doctor_reports_a_bad_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QLACOMPILE_STRICT", "perhaps")
    code, found = _json(capsys, "doctor")
    assert code == 1
    assert "QLACOMPILE_STRICT" in found["options"]["error"]


def test_tested_ranges_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ranges = {"torch": r'"torch>=([\d.]+),<([\d.]+)"', "transformers": r'"transformers>=([\d.]+),<([\d.]+)"'}
    ranges["python"] = r'requires-python = ">=([\d.]+),<([\d.]+)"'
    for name, pattern in ranges.items():
        found = re.search(pattern, text)
        assert found and found.groups() == doctor.TESTED[name]
    for name in ("tilelang", "fla-core"):
        found = re.search(rf'"{name}==([\d.]+)"', text)
        assert found and found.group(1) == doctor.TESTED[name][0]


def test_explain_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = _json(capsys, "explain", LOOP, "--shapes", *SHAPES, "--save", str(tmp_path / "r.html"))
    assert code == 0
    assert report["matches"][0]["steps"] == 20
    assert (tmp_path / "r.html").is_file()


def test_explain_without_a_match_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def f(x):\n    return x + 1\n")
    code, report = _json(capsys, "explain", f"{tmp_path / 'plain.py'}:f", "--shapes", "x=3")
    assert code == 1
    assert report["matches"] == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["explain", "missing.py:f"], "no file missing.py"),
        (["explain", "no_function.py"], "path.py:function"),
        (["explain", LOOP.replace(":list_stack", ":list_stak")], "it has"),
        (["explain", LOOP, "--shapes", "q=1,x"], "NAME=SHAPE"),
        (["explain", LOOP, "--shapes", *SHAPES[:-1]], "no shape for beta"),
        (["explain", "no_such_package:f"], "can not import no_such_package"),
        (["warm", "--dtypes", "float32"], "expected bfloat16 or float16"),
        (["bench", "no_such_benchmark"], "no benchmark"),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else "",
)
def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    code, document = _json(capsys, *argv)
    assert code == 2
    assert says in document["error"]


def test_no_command_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_warm_without_a_gpu_has_nothing_to_build(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "warm")
    assert code == 0
    assert document["built"] == {}
    assert document["reason"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_and_not_against_the_users_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Console().paint("x", "bad", _Terminal()) == "\033[31mx\033[0m"
    assert Console().paint("x", "bad", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Console().paint("x", "bad", _Terminal()) == "x"


def test_progress_writes_plain_lines_into_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(console.sys, "stderr", log)
    with Console().progress("compiling"):
        pass
    assert re.fullmatch(r"  compiling: \d+\.\d s\n", log.getvalue())


@pytest.mark.inductor
def test_demo_measures_and_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BUDGET", 0.0)
    part = demo.Part("loop", "", demo.loop_problem, 32, 4, 32)
    device = torch.device("cpu")
    eager = demo.measure(part, "eager", device, Console(), {})
    row = demo.measure(part, "flashqla", device, Console(), eager.errors)
    assert row.ok and row.regions == 1
    assert set(row.errors) == {"output", "q", "k", "v", "g", "beta"}
    monkeypatch.setattr(demo, "BOUND", {torch.float32: 0.0})
    monkeypatch.setattr(demo, "TIMES", 0)
    assert not demo.measure(part, "flashqla", device, Console(), eager.errors).ok
