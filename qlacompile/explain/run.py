"""``qlacompile.explain(fn)(*args)``: compile once, run once, return the Report."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import QlaError
from .breaks import graph_breaks
from .collect import collecting
from .report import Report


class _Fresh(dict[str, Any]):
    """Options that equal no others: torch reuses what was compiled with equal ones, and nothing would be seen."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def explain(fn: Callable[..., Any], **compile_kwargs: Any) -> Callable[..., Report]:
    """``qlacompile.explain(model)(*args, **kwargs)`` says what ``backend="flashqla"`` does with ``model``, and why.

    It compiles and runs ``fn`` once on the arguments, so side effects of ``fn`` happen once. ``compile_kwargs`` go to
    ``torch.compile`` (``dynamic=``, ``fullgraph=``, ``options=``). Unless the options say otherwise, the rest of the
    graph runs eagerly (``flashqla.rest`` = ``"eager"``), because generating code for it tells nothing about matches.
    """
    if "backend" in compile_kwargs:
        raise TypeError('explain() always uses backend="flashqla"; leave out backend=')

    def run(*args: Any, **kwargs: Any) -> Report:
        settings = dict(compile_kwargs)
        settings.pop("mode", None)  # only inductor reads it, and torch takes either a mode or options
        settings["options"] = _Fresh({"flashqla.rest": "eager", **(settings.get("options") or {})})
        # The user's own compiled versions of fn stay as they are: this compile gets cache entries of its own. Where
        # torch cannot do that yet, everything is recompiled afterwards, as torch._dynamo.explain does.
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            settings.setdefault("isolate_recompiles", True)
        else:
            torch.compiler.reset()
        with collecting() as collector, graph_breaks() as reasons:
            try:
                torch.compile(fn, backend="flashqla", **settings)(*args, **kwargs)
            except Exception as error:
                # torch wraps what a backend raises in an error of its own
                cause = getattr(error, "inner_exception", None)
                raise (cause if isinstance(cause, QlaError) else error) from None
        return collector.report(tuple(reasons))

    return run
