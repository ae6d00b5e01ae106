"""Every variant of the Hopper kernels is lowered and assembled for sm_90a: no spills, nothing an SM does not have.

Needs TileLang and nvcc, no GPU. The assembler's word is taken for registers and spills; shared memory and the
budgets of set_max_nreg are read from the generated source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qlacompile.kernels import gdn_sm90
from qlacompile.kernels.gdn_sm90 import launch

SHARED_MEMORY = 232448  # bytes a block can have on compute capability 9.0
REGISTERS = 512  # per thread slot of an SM's 128-thread groups: what all warpgroups of a block may claim together
SPILLS = {"solve": 64}  # bytes a thread may spill: none, but for the unrolled substitution, once outside of it

pytestmark = [
    pytest.mark.skipif(gdn_sm90.tilelang_version() != gdn_sm90.TILELANG, reason=f"needs TileLang {gdn_sm90.TILELANG}"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH"),
]

ALL = [key for K in (128, 64) for name in ("bfloat16", "float16") for key in launch.variants(K, name)]
# Dtypes differ in the name of the tensor-core instruction only: one will do, but for a release.
FIRST = [key for key in ALL if "float16" not in key and key not in [("gradients", 64, "bfloat16", "float32")]]
LATER = pytest.mark.skipif(not os.environ.get("QLACOMPILE_ALL_VARIANTS"), reason="set QLACOMPILE_ALL_VARIANTS=1")


def assemble(key: tuple, folder: Path) -> tuple[str, str, int]:
    """The CUDA source, the assembler's report, and dynamic shared memory in bytes."""
    import tilelang
    from tilelang import tvm
    from tilelang.contrib import nvcc
    from tilelang.transform.pass_config import normalize_pass_configs

    func, configs = launch.program(*key)
    target = tvm.target.Target(launch.TARGET)
    with tvm.transform.PassContext(opt_level=3, config=normalize_pass_configs(dict(configs))), target:
        artifact = tilelang.lower(func, target=target)
    source = folder / "kernel.cu"
    source.write_text(artifact.kernel_source)
    command = ["nvcc", "-cubin", "-O3", "-arch=sm_90a", "-Xptxas=-v", *nvcc.default_compile_options()]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin"), str(source)], capture_output=True, text=True, check=False
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-2000:]
    sizes = [int(f.attrs["dyn_shared_memory_buf"]) for f in artifact.device_mod.functions.values()]
    return artifact.kernel_source, report, max(sizes)


def check_register_budgets(source: str, report: str) -> None:
    """A warpgroup that asks for more registers than the others have given back waits for ever.

    What a block is launched with is what its warpgroups may share: registers at launch times warpgroups. With one
    block on an SM that is at most 512 a thread slot; with more it is what ``__launch_bounds__`` left for each.
    """
    takes = [int(n) for n in re.findall(r"warpgroup_reg_alloc<(\d+)>", source)]
    gives = [int(n) for n in re.findall(r"warpgroup_reg_dealloc<(\d+)>", source)]
    if not takes:
        return
    groups = int(re.search(r"__launch_bounds__\((\d+)", source).group(1)) // 128
    launched = int(re.search(r"Used (\d+) registers", report).group(1)) * groups
    assert len(takes) == 1, "count the warpgroups of each branch"
    claimed = sum(gives) + takes[0] * (groups - len(gives))
    assert claimed <= min(launched, REGISTERS), (claimed, launched)


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, id="-".join(map(str, key)), marks=() if key in FIRST else LATER) for key in ALL],
)
def test_variant_fits_the_chip(key: tuple, tmp_path: Path) -> None:
    source, report, shared = assemble(key, tmp_path)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))
    assert spills <= SPILLS.get(key[0], 0), report
    shared += sum(int(n) for n in re.findall(r"(\d+) bytes smem", report))
    assert shared <= SHARED_MEMORY
    assert "serialized" not in report, report  # wgmma that waits for each other
    check_register_budgets(source, report)
    assert re.search(r"\b(Hv|Hk|R|B|S)\b", source.split("{", 1)[0]), "sizes are arguments, not constants"


def test_importing_the_kernel_imports_no_compiler() -> None:
    code = "import sys, qlacompile.kernels.gdn_sm90.launch; assert 'tilelang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
