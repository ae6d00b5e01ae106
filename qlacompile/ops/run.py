"""Run a family on the kernel that was chosen for it, and on the portable one if that fails."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import ArgumentError, KernelError
from ..ir import Kernel, Spec
from ..lower import PORTABLE, choose, get

log = logging.getLogger(__name__)

T = TypeVar("T")

_warned: set[tuple[str, str]] = set()
_failed: dict[tuple[str, Spec], KernelError] = {}


def reset() -> None:
    """Forget which kernels have failed and what was warned about, so that they are tried and reported again."""
    _warned.clear()
    _failed.clear()


def run(family: str, name: str, strict: bool, describe: Callable[[], Spec], call: Callable[[Kernel], T]) -> T:
    """``call(kernel)`` for the family's kernel ``name``, or for the best one if it is ``"auto"``.

    A kernel that refuses the Spec, or fails on it, is replaced by the portable one: with one warning for each kernel
    and reason, and without another try for the same Spec. ``strict`` raises the ``KernelError`` instead. Running out
    of memory and errors about the arguments are nobody else's to solve and are raised as they are.
    """
    if name == PORTABLE:
        return call(get(name, family))
    spec = describe()
    if name == "auto":
        name = choose(spec).kernel
    kernel = get(name, family)
    if name == PORTABLE:
        return call(kernel)
    failure = _failed.get((name, spec)) or _refusal(kernel, spec)
    if failure is None:
        try:
            return call(kernel)
        except (ArgumentError, torch.cuda.OutOfMemoryError):
            raise
        except KernelError as error:
            failure = error
        except Exception as error:
            failure = KernelError("QLA507", f"kernel {name} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        _failed[name, spec] = failure
    if strict:
        raise failure
    _report(name, failure)
    return call(get(PORTABLE, family))


def _refusal(kernel: Kernel, spec: Spec) -> KernelError | None:
    """Sizes can differ from those that the kernel was chosen for when the graph was compiled."""
    refusal = kernel.supports(spec)
    return None if refusal is None else KernelError(refusal[0], f"kernel {kernel.name} can not run this: {refusal[1]}")


def _report(name: str, failure: KernelError) -> None:
    key = (name, str(failure))
    if key in _warned:
        return
    _warned.add(key)
    message = f"{failure}\nThe portable kernel runs instead, which is slower. With strict=True this is an error."
    log.warning(message, exc_info=failure.__cause__)
    warnings.warn(message, RuntimeWarning, stacklevel=2)
