"""The backend as a citizen: options, strict mode, verification, and nothing global changed."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import qlacompile
from compiled import compile_and_run, relative
from near_misses.neighbours import NEIGHBOURS
from qlacompile.errors import OptionError, StrictError
from zoo.token_loops import SPELLINGS

LOOP = next(s for s in SPELLINGS if s.name == "list_stack")
MISS = next(n for n in NEIGHBOURS if n.name == "kda")


def compiled(fn, **options):
    settings = {"flashqla.rest": "eager", **{f"flashqla.{k}": v for k, v in options.items()}}
    return torch.compile(fn, backend="flashqla", options=settings)


def cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(Exception, match=r"QLA001.*flashqla\.strict"):
        compiled(LOOP.fn, strikt=True)(*LOOP.make())


def test_strict_raises_with_the_reason() -> None:
    with pytest.raises(Exception, match="QLA003") as info:
        compiled(MISS.fn, strict=True)(*MISS.make())
    assert "QLA203" in str(info.value)
    compiled(LOOP.fn, strict=True)(*LOOP.make())


def test_option_errors_are_value_errors() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(StrictError, RuntimeError)


def test_verify_passes_and_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    args = LOOP.make(seed=2)
    fn = compiled(LOOP.fn, verify="once")
    expected = LOOP.fn(*args)
    for _ in range(2):
        assert relative(fn(*args)[0], expected[0]) < 1e-5
    from qlacompile.lower import get

    kernel = type(get("reference"))
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, *a: tuple(1.5 * t for t in forward(self, *a)))
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="differs from the eager graph"):
        compiled(LOOP.fn, verify="once")(*args)


def test_nothing_global_changes() -> None:
    import torch._dynamo.config
    import torch._inductor.config

    configs = (torch._dynamo.config, torch._inductor.config)
    before = [copy.deepcopy(c.get_config_copy()) for c in configs]
    compile_and_run(LOOP.fn, LOOP.make(), rest="aot_eager")
    assert [c.get_config_copy() for c in configs] == before


def test_another_backend_is_untouched() -> None:
    seen = []

    def other(gm, example_inputs):
        seen.append(len(gm.graph.nodes))
        return gm.forward

    args = LOOP.make(T=12)
    torch.compile(LOOP.fn, backend=other)(*args)
    assert seen[0] > 12 * 10  # unrolled, as without us


def test_loops_cost_a_constant_number_of_nodes() -> None:
    counts = set()
    for T in (16, 64, 256):
        report = compile_and_run(LOOP.fn, LOOP.make(B=1, T=T), grad=False).report
        assert report is not None
        counts.add(report.node_counts)
    assert len(counts) == 1


def test_report_says_everything() -> None:
    report = qlacompile.explain(LOOP.fn)(*LOOP.make())
    (match,) = report.matches
    assert (match.family, match.form, match.steps, match.kernel) == ("gated_delta_rule", "token", 24, "reference")
    lines, first = inspect.getsourcelines(LOOP.fn)
    loop = first + next(i for i, line in enumerate(lines) if "for t in range" in line)
    assert match.source.endswith(f"token_loops.py:{loop}")
    assert match.kernel_refusals[0][:2] == ("gdn_sm90", "QLA501")
    assert {"recognise", "prove", "rewrite", "lower"} <= set(report.seconds)
    assert "gated_delta_rule" in str(report)
