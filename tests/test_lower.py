"""Which kernel runs a Spec, and what is said about the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from qlacompile import lower
from qlacompile.errors import CODES, ArgumentError, KernelError
from qlacompile.ir import Spec

SPEC = Spec(
    "gated_delta_rule", "direct", batch=2, seq_len=100, k_heads=2, v_heads=4, key_dim=24, value_dim=40,
    dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


def test_portable_kernel_runs_every_floating_spec():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for packed in (False, True):
            choice = lower.choose(replace(SPEC, dtype=dtype, packed=packed, needs_grad=True))
            assert choice.kernel == "reference"


def test_every_other_kernel_has_a_coded_reason():
    choice = lower.choose(SPEC)
    told = {name for name, _, _ in choice.refusals}
    assert {choice.kernel} | told >= set(lower.names("gated_delta_rule"))
    assert all(code in CODES and reason for _, code, reason in choice.refusals)


def test_allowed_kernels():
    assert lower.choose(SPEC, ("reference",)).kernel == "reference"
    with pytest.raises(ArgumentError, match=r"QLA405.*'quick'.*reference"):
        lower.choose(SPEC, ("quick",))
    with pytest.raises(KernelError, match=r"QLA508.*reference: QLA508 not among the allowed kernels"):
        lower.choose(SPEC, ())
    with pytest.raises(KernelError, match="no allowed kernel runs this mamba"):
        lower.choose(replace(SPEC, family="mamba"))


def test_get():
    assert lower.get("reference").name == "reference"
    with pytest.raises(ArgumentError, match="QLA405"):
        lower.get("nothing")


def write(folder, name, text):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


def test_a_folder_that_can_not_be_imported_is_a_refusal(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    write(package, "good", "class K:\n    name, family, version, priority = 'good', 'f', 1, 0\nKERNELS = [K()]\n")
    write(package, "needs", "import a_package_that_does_not_exist\n")
    write(package, "crashes", "raise OSError('libcuda.so.1: cannot open shared object file')\n")
    write(package, "empty", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    found, broken = lower.load_folders("some_kernels", ["needs", "good", "crashes", "empty"])
    assert [name for _, name in found] == ["good"]
    assert {folder: code for folder, code, _ in broken} == dict.fromkeys(("needs", "crashes", "empty"), "QLA505")
    assert "a_package_that_does_not_exist" in {f: reason for f, _, reason in broken}["needs"]

    monkeypatch.setattr(lower, "discover", lambda: ({**real[0], **found}, broken))
    lower.choose.cache_clear()
    choice = lower.choose(SPEC)
    lower.choose.cache_clear()
    assert choice.kernel == "reference"
    assert ("needs", "QLA505") in {(name, code) for name, code, _ in choice.refusals}


real = lower.discover()


def test_two_kernels_of_one_name(tmp_path, monkeypatch):
    text = "class K:\n    name, family, version, priority = 'same', 'f', 1, 0\nKERNELS = [K()]\n"
    write(tmp_path / "twins", "one", text)
    write(tmp_path / "twins", "two", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="two kernels of family f are called same"):
        lower.load_folders("twins", ["one", "two"])


def test_higher_priority_wins(monkeypatch):
    class Better:
        name, family, version, priority = "better", "gated_delta_rule", 1, 50

        def supports(self, spec):
            return ("QLA503", "only 128") if spec.key_dim != 128 else None

    found, broken = real
    monkeypatch.setattr(lower, "discover", lambda: ({**found, ("gated_delta_rule", "better"): Better()}, broken))
    lower.choose.cache_clear()
    wide = lower.choose(replace(SPEC, key_dim=128))
    narrow = lower.choose(SPEC)
    lower.choose.cache_clear()
    assert wide.kernel == "better"
    assert ("reference", "QLA508", "better is preferred") in wide.refusals
    assert narrow.kernel == "reference"
    assert ("better", "QLA503", "only 128") in narrow.refusals


def test_discovery_loads_no_compiler_and_no_gpu():
    code = (
        "import sys; from qlacompile import lower; lower.discover(); import torch;"
        "assert 'tilelang' not in sys.modules and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
