"""Every error and refusal code of qlacompile, and the exceptions that carry them.

A code is a promise: it is printed, logged, tested and documented, and never reused for another meaning. The hundreds
say which stage speaks: 0xx options, 1xx roll, 2xx recognise and prove, 3xx effects and rewrite, 4xx operator
arguments, 5xx kernels.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "QLA001": "unknown option",
    "QLA002": "option has a value that is not allowed",
    "QLA003": "strict mode: something was not compiled to a fused kernel",
    "QLA101": "rolling is off because this torch or Python behaves differently from what it was checked against",
    "QLA102": "the loop is too short to roll",
    "QLA103": "control flow or shapes in the loop depend on the loop index",
    "QLA104": "two iterations of the loop do not compute the same thing",
    "QLA105": "the loop changes state that can not be carried (attribute, dict, set, cell, generator, RNG, mode)",
    "QLA106": "a list that grows in the loop is also read in the loop",
    "QLA201": "the loop carries no state that a known family has",
    "QLA202": "the state update is not the one of any known family",
    "QLA203": "the state update is the one of a known neighbour, which is not supported yet",
    "QLA204": "the output is not the family's read of the state",
    "QLA205": "an input of the step is not read at the loop index",
    "QLA206": "the inputs could not be identified (no assignment of roles reproduces the computation)",
    "QLA207": "the proof failed: the region and the candidate disagree on random data",
    "QLA208": "the region contains an operation whose effect is not known",
    "QLA209": "the region is too large to be evaluated for the proof",
    "QLA301": "an intermediate state is used outside the region",
    "QLA302": "the region writes to memory that something else can see",
    "QLA303": "the state is rounded to a lower precision inside the loop",
    "QLA304": "the region switches RNG, gradient or autocast modes",
    "QLA305": "the linear decay can not be proven to be positive",
    "QLA401": "argument has the wrong shape",
    "QLA402": "argument has an unsupported dtype",
    "QLA403": "arguments are on different devices",
    "QLA404": "cu_seqlens is not valid",
    "QLA405": "argument has a value that is not allowed",
    "QLA501": "kernel does not cover this device",
    "QLA502": "kernel does not cover this dtype",
    "QLA503": "kernel does not cover this head size",
    "QLA504": "kernel does not cover this feature",
    "QLA505": "a package that the kernel needs can not be imported",
    "QLA506": "the kernel could not be built",
    "QLA507": "the kernel could not be launched",
    "QLA508": "kernel was ruled out by an option",
}


class QlaError(Exception):
    """Base of all errors of qlacompile. ``code`` is a key of :data:`CODES`."""

    def __init__(self, code: str, message: str, *, source: str = "") -> None:
        self.code = code
        self.source = source
        where = f"\n  at {source}" if source else ""
        super().__init__(f"{code}: {message}{where}")


class OptionError(QlaError, ValueError):
    """An unknown option, or an option with a value that is not allowed."""


class ArgumentError(QlaError, ValueError):
    """An operator was called with arguments that do not fit together."""


class StrictError(QlaError, RuntimeError):
    """``flashqla.strict`` is on and something could not be compiled to a fused kernel."""


class KernelError(QlaError, RuntimeError):
    """A kernel could not be built or launched."""
