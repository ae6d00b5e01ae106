"""``explain``: load a function, make arguments for it, and print its Report."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..explain.run import explain
from .console import Console, UsageError


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    fn = load(args.target)
    arguments = make_arguments(fn, args.shapes, torch.device(args.device), args.grad)
    with console.progress(f"compiling {args.target}"):
        report = explain(fn)(**arguments)
    console.say(str(report))
    console.document(report.to_dict())
    if args.save:
        console.say(f"written to {report.save(args.save)}")
    return 0 if report.matches else 1


def load(target: str) -> Callable[..., Any]:
    """The object named by ``path.py:name`` or ``package.module:name``."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise UsageError(f"target {target!r} has no function; write path.py:function")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"there is no file {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))  # the file's neighbours, as when it is run
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ImportError as error:
            raise UsageError(f"can not import {where}: {error}") from error
    fn = getattr(module, name, None)
    if not callable(fn):
        names = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)
        raise UsageError(f"{where} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return fn


def make_arguments(
    fn: Callable[..., Any], shapes: list[str], device: torch.device, grad: bool = False
) -> dict[str, torch.Tensor]:
    """Random tensors for ``NAME=SHAPE[:dtype[:low:high]]``; without a range, normally distributed."""
    arguments = {}
    for text in shapes:
        name, _, rest = text.partition("=")
        shape, *more = rest.split(":")
        try:
            size = [int(n) for n in shape.split(",") if n]
            dtype = getattr(torch, more[0]) if more else torch.float32
            low_high = [float(n) for n in more[1:]]
            if not name or not isinstance(dtype, torch.dtype) or len(low_high) not in (0, 2):
                raise ValueError
        except (ValueError, AttributeError):
            raise UsageError(
                f"--shapes: {text!r} is not NAME=SHAPE[:dtype[:low:high]], as in g=1,64,2:float32:-1:0"
            ) from None
        value = torch.empty(size, device=device).uniform_(*low_high) if low_high else torch.randn(size, device=device)
        arguments[name] = value.to(dtype).requires_grad_(grad and dtype.is_floating_point)
    missing = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]
    if missing:
        raise UsageError(f"no shape for {', '.join(missing)}; add --shapes {missing[0]}=...")
    return arguments
