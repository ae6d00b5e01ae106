"""Who may import whom, who may touch torch's internals, and how long a file may get.

The plan: values travel between the stages in ``ir``; a pattern produces a Spec, a kernel consumes it, and neither knows
the other; a stage knows only what stands below it; ``backend`` alone knows their order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each unit (a module or a folder under qlacompile) and the units it may import besides itself, from the bottom up. A
# new edge is a decision: it is made here, in sight.
LANGUAGE = {"errors", "ir"}
TOOLS = LANGUAGE | {"fxtools", "evaluate", "functional", "build"}
ALLOWED: dict[str, set[str]] = {
    # the language
    "errors": set(),
    "ir": {"errors"},
    "options": {"errors"},
    # what a family is, and how it runs: neither knows the other, nor any stage
    "patterns": LANGUAGE,
    "kernels": LANGUAGE,
    "lower": LANGUAGE | {"kernels"},
    "ops": LANGUAGE | {"lower"},
    # what is told
    "explain": LANGUAGE,
    # tools on graphs
    "build": set(),
    "fxtools": LANGUAGE,
    "evaluate": LANGUAGE | {"fxtools"},
    "functional": LANGUAGE | {"fxtools"},
    # stages
    "roll": TOOLS,
    "access": LANGUAGE,
    "steps": TOOLS | {"access", "body"},
    "regions": TOOLS | {"roll"},
    "body": TOOLS,
    "inline": TOOLS | {"steps"},
    "core": TOOLS | {"roll", "regions"},
    "recognise": TOOLS | {"core"} | {"roll", "access", "steps", "inline", "regions", "patterns"},
    "prove": TOOLS | {"core", "regions", "recognise"},
    "effects": TOOLS | {"roll"},
    "norms": TOOLS,
    "peel": TOOLS | {"norms"},
    "hoist": TOOLS | {"norms", "access", "steps"},
    "emission": TOOLS | {"recognise", "hoist", "peel"},
    "rewrite": TOOLS | {"roll", "recognise", "effects", "emission"},
    "rest": LANGUAGE,
    "verify": LANGUAGE,
    # the people's side
    "__init__": {"errors", "explain", "ops"},
    "__main__": {"cli"},
    "cli": {"errors", "commands"},
    "commands": LANGUAGE | {"options", "explain", "lower", "roll", "kernels", "__init__"},
    "demo": {"commands", "explain"},
}
ORCHESTRATOR = "backend"  # may import every stage

# torch keeps no promises about these; each use is fenced in and has a fallback
INTERNALS = (
    "torch._dynamo",
    "torch._guards",
    "torch.fx.experimental.symbolic_shapes",
    "torch._inductor",
    "torch._functorch",
)
MAY_TOUCH_INTERNALS = {
    "roll/dynamo/": "the hook",
    "explain/breaks.py": "why torch broke the graph",
    "rest.py": "hands the rest to inductor",
}

LONGEST = {"qlacompile": 300, "patterns": 300, "kernels": 600}
LONGER = {
    "ir.py": 400,  # only values, read together
    "patterns/gated_delta_rule.py": 400,  # one family, one file
    "steps.py": 360,  # one class
    "emission.py": 350,  # one class
}


def _files() -> Iterator[tuple[str, Path]]:
    """``(path under qlacompile, file)`` for every module, the linked folders included."""
    for name in ("qlacompile", "patterns", "kernels"):
        folder = ROOT / name
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if inside.parts[0] not in ("patterns", "kernels"):
                yield str(inside if name == "qlacompile" else Path(name) / inside), path


FILES = dict(_files())


def _imports(path: str) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it the import stands."""
    package = ["qlacompile", *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(FILES[path].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _unit(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def _units(path: str) -> set[str]:
    """The units of qlacompile that a file imports."""
    units = {name.removesuffix(".py") for name in (p.split("/")[0] for p in FILES)}
    found = {_unit(name) for name in _imports(path) if name.split(".")[0] == "qlacompile"}
    return {unit if unit in units else "__init__" for unit in found}


@pytest.mark.parametrize("path", FILES)
def test_imports_follow_the_plan(path: str) -> None:
    own = path.split("/", maxsplit=1)[0].removesuffix(".py")
    if own == ORCHESTRATOR:
        return
    allowed = ALLOWED.get(own, TOOLS) | {own}  # what is not listed may use the tools, and no stage
    assert _units(path) <= allowed, f"{path} may import {sorted(allowed)} of qlacompile"


def test_the_plan_has_no_cycles() -> None:
    """The code can be read from the bottom up."""
    done: set[str] = set()
    rest = {unit: set(below) for unit, below in ALLOWED.items()}
    while rest:
        ready = {unit for unit, below in rest.items() if below <= done | {unit}}
        assert ready, f"a cycle among {sorted(rest)}"
        done |= ready
        rest = {unit: below for unit, below in rest.items() if unit not in ready}


@pytest.mark.parametrize("path", [p for p in FILES if p.startswith("kernels/")])
def test_a_kernel_does_not_know_another_kernel(path: str) -> None:
    own = ".".join(["qlacompile", *Path(path).parts[:2]])
    assert all(name.startswith(own) for name in _imports(path) if name.startswith("qlacompile.kernels"))


@pytest.mark.parametrize("path", FILES)
def test_internals_of_torch_are_fenced_in(path: str) -> None:
    touched = {name for name in _imports(path) if name.startswith(INTERNALS)}
    assert not touched or any(path.startswith(prefix) for prefix in MAY_TOUCH_INTERNALS)


@pytest.mark.parametrize("path", FILES)
def test_file_has_one_responsibility(path: str) -> None:
    """Length is no proof of it, but a file beyond this has always had two."""
    top = path.split("/", maxsplit=1)[0]
    limit = LONGER.get(path, LONGEST.get(top, LONGEST["qlacompile"]))
    lines = len(FILES[path].read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{path} has {lines} lines; split it by what it is responsible for"
