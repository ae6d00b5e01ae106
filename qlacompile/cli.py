"""The command line: ``python -m qlacompile demo | doctor | explain | warm | bench``.

Exit codes: 0 everything held, 1 something did not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from .commands.console import Console, UsageError
from .errors import QlaError

Command = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m qlacompile", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, help: str, module: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        sub.set_defaults(module=module or f"qlacompile.commands.{name}")
        return sub

    demo = add(
        "demo", "compare eager, inductor and flashqla on a transformers layer and a token loop", "qlacompile.demo"
    )
    demo.add_argument("--only", choices=("layer", "loop"), help="run one of the two parts")
    demo.add_argument("--device", help="cpu or cuda; cuda where there is one")
    # threads that wait for each other on busy cores cost far more than they save at these sizes
    demo.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")

    add("doctor", "what is installed here, which kernels are usable, and why others are not")

    explain = add("explain", "compile one function and say what was matched and what was not")
    explain.add_argument("target", help="path.py:function or package.module:function")
    explain.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="NAME=SHAPE",
        help="arguments by name, each a shape with an optional dtype and range: q=1,64,2,16 g=1,64,2:float32:-1:0",
    )
    explain.add_argument("--device", default="cpu")
    explain.add_argument("--grad", action="store_true", help="let all floating arguments require a gradient")
    explain.add_argument("--save", metavar="FILE", help="also write the report; .html, .json or text by the suffix")

    warm = add("warm", "build the Hopper kernels ahead of their first use; needs no GPU")
    warm.add_argument("--key-dims", type=int, nargs="+", default=[128, 64])
    warm.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])

    bench = add("bench", "run the benchmarks of a checkout")
    bench.add_argument("names", nargs="*", help="scripts in benchmarks/, without .py; the CPU ones if none is given")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    run: Command = importlib.import_module(args.module).run
    try:
        return run(args)
    except UsageError as error:
        return _failed(args, str(error), 2)
    except QlaError as error:
        return _failed(args, str(error), 1)
    except KeyboardInterrupt:
        return _failed(args, "interrupted", 1)


def _failed(args: Any, message: str, code: int) -> int:
    Console(args.json).error(message)
    return code
