"""``bench``: run the scripts in benchmarks/ of the checkout that this package is installed from."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .console import Console, UsageError

DEFAULT = ("compile_time", "cpu_runtime")


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    known = sorted(p.stem for p in folder.glob("*.py") if not p.name.startswith("_"))
    if not known:
        raise UsageError("bench needs a checkout of qlacompile installed with `pip install -e`; this is not one")
    names = args.names or [name for name in DEFAULT if name in known]
    for name in names:
        if name not in known:
            raise UsageError(f"no benchmark {name!r}; there are {', '.join(known)}")
    codes: dict[str, int] = {}
    for name in names:
        console.say(f"== {name}")
        # in JSON mode the scripts' tables go to stderr, so that stdout stays one document
        out = sys.stderr if args.json else None
        codes[name] = subprocess.run([sys.executable, str(folder / f"{name}.py")], stdout=out, check=False).returncode
    console.document({"exit_codes": codes, "results": str(folder / "results")})
    return 0 if not any(codes.values()) else 1
