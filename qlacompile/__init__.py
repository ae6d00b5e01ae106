"""torch.compile backend that finds Gated DeltaNet recurrences in eager PyTorch and fuses them.

``torch.compile(model, backend="flashqla")`` needs no import of this package: torch finds the backend by its entry
point. Import it for :func:`explain` and for the operators in ``qlacompile.ops``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .explain.report import Report
from .explain.run import explain

if TYPE_CHECKING:
    from qlacompile import ops

__version__ = "0.1.0"
__all__ = ["Report", "__version__", "errors", "explain", "ops"]


def __getattr__(name: str) -> Any:
    if name == "ops":  # registers operators with torch, which an import for explain() alone should not pay for
        import importlib

        return importlib.import_module(".ops", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
