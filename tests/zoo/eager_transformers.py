"""transformers' modelling modules with their eager functions, whether or not fla is installed beside them.

transformers decides when a modelling module is imported whether its layers call fla's kernels. Those need a GPU and
hide the eager code, so fla is hidden while the modules are imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

NAMES = ("qwen3_next", "qwen3_5", "olmo_hybrid")


def _import() -> dict[str, ModuleType]:
    before = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        return {name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in NAMES}
    finally:
        del sys.modules["fla"]
        if before is not None:
            sys.modules["fla"] = before


MODULES = _import()
