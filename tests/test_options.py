"""Options: what is accepted, what is refused and how it is said, and where a value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlacompile.errors import OptionError
from qlacompile.options import Options, options_table


def test_ours_and_the_rest_are_split() -> None:
    options, rest = Options.parse({"flashqla.strict": True, "max_autotune": False}, env={})
    assert options == Options(strict=True)
    assert rest == {"max_autotune": False}


def test_nothing_given() -> None:
    assert Options.parse(None, env={}) == (Options(), {})


@pytest.mark.parametrize("key", ["flashqla.strickt", "flashqla_strict", "FlashQLA.strict", "flashqla.Strict"])
def test_unknown_key_names_the_nearest(key: str) -> None:
    with pytest.raises(OptionError, match=r"QLA001.*did you mean 'flashqla\.strict'"):
        Options.parse({key: True}, env={})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("strict", 1, "True or False"),
        ("verify", "always", "'off' or 'once'"),
        ("rest", None, "'inductor' or 'aot_eager' or 'eager'"),
        ("kernels", "reference", "non-empty list"),
        ("kernels", [], "non-empty list"),
        ("kernels", [3], "non-empty list"),
    ],
)
def test_bad_value_says_what_was_found_and_expected(name: str, value: object, expected: str) -> None:
    with pytest.raises(OptionError, match=f"QLA002.*flashqla.{name}") as caught:
        Options.parse({f"flashqla.{name}": value}, env={})
    assert repr(value) in str(caught.value)
    assert expected in str(caught.value)


def test_kernels_become_a_tuple_so_that_options_hash() -> None:
    options, _ = Options.parse({"flashqla.kernels": ["a", "b"]}, env={})
    assert options.kernels == ("a", "b")
    hash(options)


def test_the_call_goes_before_the_environment() -> None:
    env = {"QLACOMPILE_STRICT": "1", "QLACOMPILE_KERNELS": "a, b", "QLACOMPILE_REST": "eager"}
    options, _ = Options.parse({"flashqla.strict": False}, env=env)
    assert options == Options(strict=False, kernels=("a", "b"), rest="eager")


def test_bad_environment_names_the_variable() -> None:
    with pytest.raises(OptionError, match=r"QLA002.*QLACOMPILE_STRICT"):
        Options.parse(None, env={"QLACOMPILE_STRICT": "perhaps"})


def test_readme_has_the_table() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    assert options_table() in readme.read_text(encoding="utf-8")
