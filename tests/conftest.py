"""Set-up of every test process: what is imported from where, threads, seeds, and which tests can run here."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
_ROOT = _TESTS.parent

# `python -m pytest` puts the checkout on the path. There, ./kernels would look like the package of that name that
# transformers asks for, and ./qlacompile would hide an installed one. Only tests/ itself is needed: oracle, zoo, ...
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]
if str(_TESTS) not in sys.path:
    sys.path.insert(0, str(_TESTS))

SEED = int(os.environ.get("QLACOMPILE_TEST_SEED", "0"))

# Workers times threads should not exceed the cores; more threads also make sums depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> list[str]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [f"torch {torch.__version__}, gpu {gpu}, seed {SEED} (QLACOMPILE_TEST_SEED)"]


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Each test starts from the same seeds and leaves no compiled code behind for the next."""
    import torch

    random.seed(SEED)
    torch.manual_seed(SEED)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
