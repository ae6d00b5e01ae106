"""The package as it is installed and imported: links, names, weight of the import, entry point, wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "patterns")


def _python(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints, outside of the checkout and free of the environment's settings for tests."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("QLACOMPILE_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_resolves(name: str) -> None:
    link = ROOT / "qlacompile" / name
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", name)
    assert link.resolve() == ROOT / name
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_is_no_package_of_its_own(name: str) -> None:
    """With an __init__.py, transformers would take ./kernels for the package of that name."""
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("name", [*LINKED, "benchmarks"])
def test_top_level_name_is_not_taken(name: str) -> None:
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    assert not any(place and Path(place).resolve().is_relative_to(ROOT) for place in places)


_IMPORT = """
import json, sys, time
import torch
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
heavy = [m for m in ("tilelang", "transformers", "triton", "torch._inductor", "torch._dynamo") if m in sys.modules]
print(json.dumps({{"seconds": seconds, "heavy": heavy, "cuda": torch.cuda.is_initialized()}}))
"""


def test_import_is_light(tmp_path: Path) -> None:
    runs = [json.loads(_python(_IMPORT.format(module="qlacompile"), tmp_path)) for _ in range(3)]
    before = set(json.loads(_python(_IMPORT.format(module="json"), tmp_path))["heavy"])
    assert set(runs[0]["heavy"]) <= before  # torch itself may bring some
    assert not runs[0]["cuda"]
    assert min(run["seconds"] for run in runs) < 0.1


def test_backend_import_brings_no_kernel_compiler(tmp_path: Path) -> None:
    run = json.loads(_python(_IMPORT.format(module="qlacompile.backend"), tmp_path))
    assert not {"tilelang", "transformers"} & set(run["heavy"])
    assert not run["cuda"]


def test_torch_lists_the_backend(tmp_path: Path) -> None:
    code = "import torch, json; print(json.dumps(torch._dynamo.list_backends(exclude_tags=())))"
    assert "flashqla" in json.loads(_python(code, tmp_path).splitlines()[-1])


def test_version_is_the_same_everywhere() -> None:
    import qlacompile

    assert qlacompile.__version__ == importlib.metadata.version("qlacompile")
    assert f"## {qlacompile.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _setuptools() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.mark.skipif(_setuptools() < 77, reason="needs the setuptools that pyproject.toml asks for")
def test_wheel_from_sdist_is_complete(tmp_path: Path) -> None:
    """The links become real folders in the sdist; the wheel made of it has every module, and nothing else."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "results")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    build = "from setuptools import build_meta as b; print(b.build_{kind}({where!r}))"
    sdist = _python(build.format(kind="sdist", where=str(tmp_path)), source).splitlines()[-1]
    shutil.unpack_archive(tmp_path / sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = _python(build.format(kind="wheel", where=str(tmp_path)), unpacked).splitlines()[-1]

    with zipfile.ZipFile(tmp_path / wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(n for n in names if n.endswith("entry_points.txt"))
        assert "flashqla = qlacompile.backend:flashqla" in archive.read(entry_points).decode()
    assert wheel.endswith("py3-none-any.whl")
    assert {n.split("/")[0].split("-")[0] for n in names} == {"qlacompile"}
    folders = {"qlacompile": ROOT / "qlacompile", **{f"qlacompile/{name}": ROOT / name for name in LINKED}}
    wanted = {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for prefix, folder in folders.items()
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert wanted <= names
    assert "qlacompile/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
