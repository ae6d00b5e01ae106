"""``doctor``: what is installed, what was tested, which kernels are usable here, and why others are not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from ..errors import QlaError
from ..ir import Spec
from ..options import Options
from .console import Console

# from and below; a test compares these with pyproject.toml
TESTED = {
    "python": ("3.10", "3.14"),
    "torch": ("2.11", "2.15"),
    "tilelang": ("0.1.15", "0.1.16"),
    "transformers": ("5.0", "6"),
    "fla-core": ("0.6.0", "0.6.1"),
}
OPTIONAL = ("tilelang", "transformers", "fla-core")
IMPORT_TIMEOUT = 90  # seconds; TileLang takes a few


def run(args: argparse.Namespace) -> int:
    console = Console(args.json)
    findings = examine()
    console.document(findings)
    _show(console, findings)
    return 0 if findings["ok"] else 1


def examine() -> dict[str, Any]:
    """All findings as plain data. ``ok`` is false if something that is needed is missing or untested."""
    versions = {name: _version(name) for name in TESTED}
    findings: dict[str, Any] = {
        "qlacompile": __version__,
        "versions": versions,
        "tilelang_import": _probe_import("tilelang"),
        "gpus": _gpus(),
        "nvcc": _nvcc(),
        "kernels": _kernels(),
        "roll": _roll(),
        "options": _options(),
    }
    needed = all(v["tested"] for name, v in versions.items() if name not in OPTIONAL)
    usable = any(reason is None for reason in findings["kernels"].values())
    findings["ok"] = needed and usable and findings["roll"] == "on" and "error" not in findings["options"]
    return findings


def _version(name: str) -> dict[str, Any]:
    low, high = TESTED[name]
    if name == "python":
        found: str | None = platform.python_version()
    elif name == "torch":
        found = torch.__version__
    else:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
    tested = found is not None and _key(low) <= _key(found) < _key(high)
    return {"found": found, "tested_range": f">={low},<{high}", "tested": tested}


def _key(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def _probe_import(module: str) -> str:
    """In a process of its own: a broken native library may abort, and a compiler may hang while it loads."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: no answer within {IMPORT_TIMEOUT} s"
    if done.returncode == 0:
        return "ok"
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"failed: {last[0]}"


def _gpus() -> list[dict[str, str]]:
    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(i),
            "capability": ".".join(str(n) for n in torch.cuda.get_device_capability(i)),
        }
        for i in range(torch.cuda.device_count())
    ]


def _nvcc() -> str | None:
    path = shutil.which("nvcc")
    if path is None:
        return None
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return path
    release = re.search(r"release ([\d.]+)", text)
    return f"{release.group(1)} ({path})" if release else path


def example_spec() -> Spec:
    """A Qwen3-Next layer in bfloat16, on the first GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Spec(
        family="gated_delta_rule",
        form="token",
        batch=1,
        seq_len=4096,
        k_heads=16,
        v_heads=32,
        key_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        device=device,
    )


def _kernels() -> dict[str, str | None]:
    """For the example layer: kernel -> ``None`` if usable, else why not."""
    from .. import lower

    spec = example_spec()
    reasons: dict[str, str | None] = {folder: f"{code} {reason}" for folder, code, reason in lower.discover()[1]}
    for name in lower.names(spec.family):
        refusal = lower.get(name, spec.family).supports(spec)
        reasons[name] = None if refusal is None else f"{refusal[0]} {refusal[1]}"
    return reasons


def _roll() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ..roll import dynamo

            return dynamo.install() or "on"
    except Exception as error:  # the hook lives on torch's internals: report whatever it met
        return f"off: {type(error).__name__}: {error}"


def _options() -> dict[str, Any]:
    """The options that a call without any gets here, from the environment and the defaults."""
    try:
        return asdict(Options.parse(None)[0])
    except QlaError as error:
        return {"error": str(error)}


def _show(console: Console, found: dict[str, Any]) -> None:
    console.say(f"qlacompile {found['qlacompile']}")
    rows = []
    for name, version in found["versions"].items():
        verdict = "tested" if version["tested"] else "not tested"
        if version["found"] is None:
            verdict = "not installed (optional)" if name in OPTIONAL else "missing"
        rows.append([name, version["found"] or "-", version["tested_range"], verdict])
    console.table(["package", "found", "tested range", ""], rows)
    console.say()
    console.say(f"import tilelang: {found['tilelang_import']}")
    gpus = [f"{gpu['name']} (capability {gpu['capability']})" for gpu in found["gpus"]]
    console.say(f"GPU: {', '.join(gpus) or 'none'}")
    console.say(f"nvcc: {found['nvcc'] or 'not found'}")
    console.say(f"rolling of loops: {found['roll']}")
    console.say(f"options: {', '.join(f'{k}={v!r}' for k, v in found['options'].items())}")
    spec = example_spec()
    console.say(f"kernels for a layer of {spec.v_heads} heads of {spec.value_dim}, bfloat16, on {spec.device.type}:")
    for name, reason in found["kernels"].items():
        mark = console.paint("usable", "good") if reason is None else f"not usable: {reason}"
        console.say(f"  {name}: {mark}")
    console.say(console.paint("all well", "good") if found["ok"] else console.paint("something needs attention", "bad"))
