"""Spec -> kernel. The only stage that knows which kernels exist, and it finds them by looking into ``kernels/``.

A folder of ``kernels/`` that exports ``KERNELS`` takes part; nothing else has to be edited to add one. A folder that
can not be imported is a refusal with the reason, never a crash: the portable kernel has no requirements.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterable
from functools import cache, lru_cache

from .errors import ArgumentError, KernelError
from .ir import Choice, Kernel, Spec

PORTABLE = "reference"
"""The kernel that runs everything, and takes over when another one fails."""

log = logging.getLogger(__name__)

_Refusals = tuple[tuple[str, str, str], ...]


@cache
def discover() -> tuple[dict[tuple[str, str], Kernel], _Refusals]:
    """All kernels by ``(family, name)``, and ``(folder, code, reason)`` for each folder that can not be imported."""
    import qlacompile.kernels as package

    return load_folders(package.__name__, [m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg])


def load_folders(package: str, folders: Iterable[str]) -> tuple[dict[tuple[str, str], Kernel], _Refusals]:
    """Import ``package.folder`` for each folder and collect its ``KERNELS``."""
    found: dict[tuple[str, str], Kernel] = {}
    broken = []
    for folder in sorted(folders):
        try:
            kernels = importlib.import_module(f"{package}.{folder}").KERNELS
        except Exception as error:  # whatever a folder does on import, the others must work
            broken.append((folder, "QLA505", f"{type(error).__name__}: {error}"))
            log.warning("QLA505: kernels/%s can not be imported: %s: %s", folder, type(error).__name__, error)
            continue
        for kernel in kernels:
            other = found.setdefault((kernel.family, kernel.name), kernel)
            if other is not kernel:
                raise ValueError(f"two kernels of family {kernel.family} are called {kernel.name}")
    return found, tuple(broken)


def names(family: str) -> tuple[str, ...]:
    """The kernels of a family, the preferred first."""
    kernels = [kernel for (of, _), kernel in discover()[0].items() if of == family]
    return tuple(k.name for k in sorted(kernels, key=lambda k: (-k.priority, k.name)))


def get(name: str, family: str = "gated_delta_rule") -> Kernel:
    """The kernel of that name; ``ArgumentError`` QLA405 if there is none."""
    kernel = discover()[0].get((family, name))
    if kernel is None:
        reasons = "".join(f"; {folder}: {reason}" for folder, _, reason in discover()[1])
        raise ArgumentError(
            "QLA405", f"kernel: found {name!r}, expected one of {_known(family)} or 'auto' for family {family}{reasons}"
        )
    return kernel


@lru_cache(maxsize=4096)
def choose(spec: Spec, allowed: tuple[str, ...] | None = None) -> Choice:
    """The kernel of the highest priority that runs ``spec``, and why each other one does not.

    ``allowed`` names the kernels that may be used, ``None`` means all. ``ArgumentError`` QLA405 for a name that does
    not exist, ``KernelError`` QLA508 if no allowed kernel runs ``spec``.
    """
    _, broken = discover()
    ordered = names(spec.family)
    for name in allowed or ():
        if name not in ordered and name not in {folder for folder, _, _ in broken}:
            raise ArgumentError("QLA405", f"allowed kernels: found {name!r}, expected some of {_known(spec.family)}")
    chosen = None
    refusals = list(broken)
    for name in ordered:
        if allowed is not None and name not in allowed:
            refusals.append((name, "QLA508", f"not among the allowed kernels {', '.join(allowed) or '(none)'}"))
            continue
        refusal = get(name, spec.family).supports(spec)
        if refusal is not None:
            refusals.append((name, *refusal))
        elif chosen is None:
            chosen = name
        else:
            refusals.append((name, "QLA508", f"{chosen} is preferred"))
    if chosen is None:
        reasons = "; ".join(f"{name}: {code} {reason}" for name, code, reason in refusals) or "there are no kernels"
        raise KernelError("QLA508", f"no allowed kernel runs this {spec.family}: {reasons}")
    return Choice(chosen, tuple(refusals))


def _known(family: str) -> str:
    return ", ".join(names(family)) or "(none)"
