"""A loop body without writes to temporaries: each becomes an operation that returns the changed tensor."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from .evaluate import op_name
from .functional import Write
from .fxtools import may_alias, written_args
from .ir import Instr, Loop, Ref, refs_in, resolve


class Entangled(Exception):
    """A write goes through a view, or to something of which a view is used later: it can not be told apart."""

    def __init__(self, reason: str, instr: Instr) -> None:
        super().__init__(reason)
        self.instr = instr


def functional(loop: Loop) -> tuple[Loop, dict[int, Ref]]:
    """The loop with functional writes, and for each invariant that is changed as a whole the value it ends a step with.

    Writes at the loop index into an invariant (``o[:, t] = ...``, ``o[:, t].copy_(...)``) are left as they are.
    """
    current: dict[Ref, Ref] = {}
    body: list[Instr] = []
    place: list[Ref] = []  # old instruction -> its result now
    views: dict[Ref, set[Ref]] = {}  # value -> what it may share memory with
    last_use = {r: i for i, instr in enumerate(loop.body) for r in refs_in((instr.args, dict(instr.kwargs)))}

    def now(ref: Ref) -> Ref:
        ref = place[ref.index] if ref.kind == "node" else ref
        while ref in current:
            ref = current[ref]
        return ref

    def moving(value: Any) -> bool:
        return any(r.kind == "int" and loop.slopes[r.index] != 0 for r in refs_in(value))

    def roots(value: Any) -> set[Ref]:
        return set().union(*(views.get(r, {r}) for r in refs_in(value) if r.kind != "int"), set())

    for i, instr in enumerate(loop.body):
        args = resolve(instr.args, now)
        kwargs = tuple((k, resolve(v, now)) for k, v in instr.kwargs)
        written = written_args(instr.op, instr.target, args, dict(kwargs))
        fresh = replace(instr, args=args, kwargs=kwargs)
        result = Ref("node", len(body))
        if not written or isinstance(instr.target, Loop):
            body.append(fresh)
            place.append(result)
            aliased = roots(may_alias(instr.op, instr.target, args, dict(kwargs)))
            views[result] = aliased or {result}
            continue
        target = written[0]
        at_index = instr.target is operator.setitem and moving(args[1])
        if isinstance(target, Ref) and target.kind == "node" and op_name(instr.target) == "copy_":
            source = body[target.index]
            at_index = at_index or (moving(source.args) and {r.kind for r in roots(target)} == {"inv"})
        if at_index:
            body.append(fresh)
            place.append(result)
            continue
        if len(written) != 1 or not isinstance(target, Ref) or args[0] != target or roots(target) != {target}:
            raise Entangled(f"{op_name(instr.target)} writes through a view", instr)
        for j, ref in enumerate(place):
            shares = target in views.get(ref, ()) and ref != target
            if shares and last_use.get(Ref("node", j), -1) > i:
                raise Entangled(f"{op_name(instr.target)} writes to a tensor of which a view is used", instr)
        body.append(replace(fresh, op="call_function", target=Write(instr.op, instr.target)))
        place.append(result)
        views[result] = {result}
        current[target] = result
    finals = {r.index: now(r) for r in list(current) if r.kind == "inv"}
    changed = replace(
        loop,
        body=tuple(body),
        carry_out=tuple(now(r) for r in loop.carry_out),
        lasts=tuple(now(r) for r in loop.lasts),
        stacks=tuple(now(r) for r in loop.stacks),
    )
    return changed, finals
