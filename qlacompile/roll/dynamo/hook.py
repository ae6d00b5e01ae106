"""Install the hooks into Dynamo's bytecode interpreter, drive a roll, and check on installation that it works."""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch import fx
from torch._dynamo import symbolic_convert as sc
from torch._dynamo.exc import ObservedException, RestartAnalysis
from torch._dynamo.variables.lists import RangeIteratorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._guards import CompileContext

from ...errors import CODES
from ...ir import Loop, Refusal
from ..compare import Unequal
from .emit import roll
from .lists import RolledListIterator, RolledListVariable, WatchedList, append, call_torch
from .marks import Mark, State
from .symbolic import begin_symbolic, end_symbolic, run_node

log = logging.getLogger("qlacompile.roll")

CONCRETE = 2  # iterations traced as usual before the symbolic one
MIN_LEFT = 2  # iterations that must be left for the symbolic one, itself included


def _ours(tx: Any) -> bool:
    """Whether the graph being traced goes to our backend, with rolling not switched off in its options."""
    fn = tx.output.compiler_fn
    for _ in range(8):
        if fn is None:
            return False
        options = (getattr(fn, "kwargs", None) or {}).get("options") or {}
        if options.get("flashqla.roll") is False:
            return False
        if getattr(fn, "_qlacompile_roll", False):
            return True
        fn = next(
            (
                inner
                for name in ("compiler_fn", "_torchdynamo_orig_backend", "__wrapped__")
                if (inner := getattr(fn, name, None)) is not None
            ),
            None,
        )
    return False


def _frame() -> Any:
    compile_id = CompileContext.current_compile_id()
    return (compile_id.frame_id, compile_id.frame_compile_id) if compile_id else None


def _line(tx: Any, inst: Any) -> str:
    positions = getattr(inst, "positions", None)
    line = (positions.lineno if positions else None) or inst.starts_line or tx.lineno
    return f"{tx.f_code.co_filename}:{line}"


def _before_for_iter(tx: Any, inst: Any) -> bool:
    """Called at the top of every iteration. True if the symbolic index was pushed and FOR_ITER is done."""
    it = tx.stack[-1].realize()
    if type(it) not in (RangeIteratorVariable, RolledListIterator) or not State.enabled or not _ours(tx):
        return False
    key = (_frame(), tx.f_code, inst.offset)
    marks = State.marks.get(id(it))
    if marks is None or marks[0].it is not it:
        marks = []
    total = it.len + len(marks)
    if key in State.blacklist or len(marks) > CONCRETE + 1 or total < CONCRETE + MIN_LEFT:
        return False
    State.marks[id(it)] = marks
    marks.append(Mark(tx, it))
    try:
        if len(marks) == CONCRETE + 1:
            begin_symbolic(tx, it, marks[-1])
            _guard_steps(tx, inst, key, marks[-1])
            return True
        if len(marks) == CONCRETE + 2:
            roll(tx, inst, it, marks, _line(tx, inst))
            end_symbolic(marks[CONCRETE])
            State.marks.pop(id(it))
    except Unequal as e:
        _refuse(tx, inst, key, e)
    return False


def _refuse(tx: Any, inst: Any, key: Any, why: Unequal) -> None:
    """Start the analysis of this frame over, with this loop left alone."""
    where = _line(tx, inst)
    State.blacklist.add(key)
    State.refusals.setdefault(key[0], []).append(Refusal(why.code, str(why), where, stage="roll"))
    log.debug("loop at %s not rolled: %s", where, why)
    for mark in list(State.active):
        end_symbolic(mark)
    State.active.clear()
    State.marks.clear()
    tx.speculation_log.clear()
    raise RestartAnalysis(restart_reason=f"{_RESTART} {where}: {why}")


_RESTART = "qlacompile could not roll the loop at"


def _guard_steps(tx: Any, inst: Any, key: Any, mark: Mark) -> None:
    """While the symbolic iteration is traced, an error in it or a jump out of the loop is ours to repair."""
    first, last = tx.indexof[inst], tx.indexof[inst.target]
    step = tx.step

    def guarded_step() -> Any:
        try:
            more = step()
        except ObservedException:
            raise  # a Python exception on its way to a handler in the user's code
        except RestartAnalysis as e:
            if (e.restart_reason or "").startswith(_RESTART):
                raise
            _refuse(tx, inst, key, Unequal(f"tracing with a symbolic index failed ({e.restart_reason})", "QLA103"))
        except Exception as e:
            _refuse(tx, inst, key, Unequal(f"tracing with a symbolic index failed ({type(e).__name__}: {e})", "QLA103"))
        pointer = tx.instruction_pointer
        if mark in State.active and (not more or pointer is None or not first <= pointer < last):
            _refuse(tx, inst, key, Unequal("the loop is left before its range ends", "QLA103"))
        return more

    tx.step = guarded_step
    mark.unguard = lambda: tx.__dict__.pop("step", None)


def _before_get_iter(tx: Any, inst: Any) -> bool:
    top = tx.stack[-1]
    if type(top) is not RolledListVariable or sys.version_info >= (3, 15):
        return False
    tx.pop()
    tx.push(RolledListIterator(top))
    return True


def _before_list_append(tx: Any, inst: Any) -> bool:
    target = tx.stack[-1 - inst.arg].realize()
    if type(target) not in (WatchedList, RolledListVariable):
        return False
    append(target, tx, tx.pop())
    return True


_HOOKS = {"FOR_ITER": _before_for_iter, "GET_ITER": _before_get_iter, "LIST_APPEND": _before_list_append}


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


def _hooked(original: Any, before: Any) -> Any:
    @functools.wraps(original)
    def opcode(tx: Any, inst: Any) -> Any:
        return None if before(tx, inst) else original(tx, inst)

    return opcode


def install() -> str:
    """Install the hooks once and try them on two small loops. Returns "" or the reason why rolling is off."""
    if State.installed:
        return State.off_reason
    State.installed = True
    try:
        if sys.version_info >= (3, 14):
            raise RuntimeError(f"Python {sys.version_info.major}.{sys.version_info.minor} was not checked")
        for cls in _subclasses(sc.InstructionTranslatorBase):
            table = cls.__dict__.get("dispatch_table")
            for name, before in _HOOKS.items():
                if table is not None and table[dis.opmap[name]] is not None:
                    table[dis.opmap[name]] = _hooked(table[dis.opmap[name]], before)
        dynamo_utils.run_node = run_node
        TorchInGraphFunctionVariable.call_function = call_torch
        _self_test()
    except Exception as e:
        State.enabled = False
        State.off_reason = f"{type(e).__name__}: {e}"
        warnings.warn(
            f"QLA101: {CODES['QLA101']} (torch {torch.__version__}, {State.off_reason}); loops are unrolled, which "
            "compiles slowly for long sequences. Please report this.",
            stacklevel=2,
        )
    return State.off_reason


def off_reason() -> str:
    """Why rolling is off, or ""."""
    return State.off_reason


def take_refusals() -> list[Refusal]:
    """The loops of the frame that is being compiled that were not rolled, and why."""
    return State.refusals.pop(_frame(), [])


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Leave all loops alone inside this block (for tests and comparisons)."""
    before, State.enabled = State.enabled, False
    try:
        yield
    finally:
        State.enabled = before


def _self_test() -> None:
    """A loop that must roll, to one node, with the right value; and one that must not."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    backend._qlacompile_roll = True  # type: ignore[attr-defined]

    def uniform(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, outs, buffer = x[0] * 0, [], torch.zeros_like(x)
        for i in range(12):
            state = state * 0.5 + x[i]
            outs.append(state + 1)
            buffer[i] = state
        return torch.stack(outs, 1), buffer

    def irregular(x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for i in range(12):
            state = state * (2.0 if i == 7 else 0.5) + x[i]
        return state

    counters = {key: dict(value) for key, value in dynamo_utils.counters.items()}
    try:
        for fn, rolls in ((uniform, True), (irregular, False)):
            graphs.clear()
            x = torch.arange(36.0).reshape(12, 3) / 36
            expected, got = fn(x), torch.compile(fn, backend=backend, fullgraph=True)(x)
            pairs = zip(expected, got) if isinstance(expected, tuple) else [(expected, got)]
            if not all(torch.equal(a, b) for a, b in pairs):
                raise RuntimeError("self-test: a loop gives another value")
            if any(isinstance(n.target, Loop) for n in graphs[0].graph.nodes) is not rolls:
                raise RuntimeError(f"self-test: a loop was {'not ' if rolls else ''}rolled")
    finally:
        State.refusals.clear()
        dynamo_utils.counters.clear()
        for key, value in counters.items():
            dynamo_utils.counters[key].update(value)
