"""What a user can set: one dataclass, read from ``torch.compile(options={"flashqla.strict": True})``.

Precedence: the call, then the environment (``QLACOMPILE_STRICT=1``), then the default. torch hands the options of a
custom backend over unchecked, so everything is checked here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .errors import OptionError

PREFIX = "flashqla."
ENV_PREFIX = "QLACOMPILE_"

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def _option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Options:
    """The options of one ``torch.compile(..., backend="flashqla")`` call. Hashable, so usable in a cache key."""

    strict: bool = _option(False, "raise `StrictError` when a recurrence is found but not fused, instead of leaving it")
    verify: str = _option(
        "off",
        "`once`: on the first real call, run the eager code too and compare; on a difference raise",
        ("off", "once"),
    )
    deterministic: bool = _option(False, "use only kernels whose results do not depend on the run or on the batch size")
    kernels: tuple[str, ...] | None = _option(
        None, "names of the kernels that may be used; unset: all (`python -m qlacompile doctor` lists them)"
    )
    roll: bool = _option(True, "turn Python loops into one node while they are traced, so compile time is free of T")
    rest: str = _option(
        "inductor", "what compiles everything around the fused operators", ("inductor", "aot_eager", "eager")
    )

    @classmethod
    def parse(
        cls, options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> tuple[Options, dict[str, Any]]:
        """Split ``options`` into ours, checked, and the rest, which belongs to inductor and is returned untouched.

        Raises OptionError: QLA001 for an unknown ``flashqla.*`` key, QLA002 for a value that is not allowed.
        """
        known = {f.name: f for f in fields(cls)}
        values = _from_env(known, os.environ if env is None else env)
        rest: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if not key.lower().startswith("flashqla"):
                rest[key] = value
                continue
            name = key.removeprefix(PREFIX)
            if not key.startswith(PREFIX) or name not in known:
                raise OptionError("QLA001", _unknown(key, known))
            values[name] = _checked(known[name], value, f"option {key!r}")
        return cls(**values), rest


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    bare = key.lower().removeprefix("flashqla").lstrip("._-")
    near = difflib.get_close_matches(bare, known, n=1, cutoff=0.4)
    hint = f"did you mean {PREFIX + near[0]!r}? " if near else ""
    return f"unknown option {key!r}; {hint}the options are {', '.join(repr(PREFIX + name) for name in known)}"


def _checked(spec: Field[Any], value: Any, where: str) -> Any:
    """``value`` in the form that the dataclass holds, or QLA002."""
    if isinstance(spec.default, bool):
        if isinstance(value, bool):
            return value
        raise _bad(where, value, "True or False")
    if choices := spec.metadata["choices"]:
        if isinstance(value, str) and value in choices:
            return value
        raise _bad(where, value, " or ".join(repr(c) for c in choices))
    if value is None:
        return None
    # a bare string is a sequence of strings too, and would silently mean one kernel per letter
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v for v in value):
        return tuple(value)
    raise _bad(where, value, "None or a non-empty list of kernel names, for example ['reference']")


def _bad(where: str, value: Any, expected: str) -> OptionError:
    return OptionError("QLA002", f"{where} is {value!r} (a {type(value).__name__}); expected {expected}")


def _from_env(known: Mapping[str, Field[Any]], env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, spec in known.items():
        variable = ENV_PREFIX + name.upper()
        text = env.get(variable, "").strip()
        if not text:
            continue
        value: Any = text
        if isinstance(spec.default, bool):
            value = True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
            if value is text:
                raise _bad(f"environment variable {variable}", text, f"one of {', '.join(_TRUE + _FALSE)}")
        elif not spec.metadata["choices"]:
            value = [part.strip() for part in text.split(",") if part.strip()]
        values[name] = _checked(spec, value, f"environment variable {variable}")
    return values


def options_table() -> str:
    """The options as a Markdown table: README.md holds this text, and a test compares the two."""
    rows = ["| option | default | environment | meaning |", "|---|---|---|---|"]
    for spec in fields(Options):
        choices = " \\| ".join(f"`{c!r}`" for c in spec.metadata["choices"])
        meaning = spec.metadata["help"] + (f" ({choices})" if choices else "")
        rows.append(f"| `{PREFIX}{spec.name}` | `{spec.default!r}` | `{ENV_PREFIX}{spec.name.upper()}` | {meaning} |")
    return "\n".join(rows)
