"""Replace the traced iterations by one node, and give every variable its value after the loop."""

from __future__ import annotations

import logging
import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy

from ...fxtools import body_writes, changes_mode
from ...ir import Loop, Ref
from ..compare import Body, Index, Unequal, bind, compare, kept, same_shape
from .lists import RolledListVariable, fresh, own_items
from .marks import Mark, State, check_unchanged, leaf
from .symbolic import loop_index

log = logging.getLogger("qlacompile.roll")


def live_at(instructions: list[Any], indexof: dict[Any, int], inst: Any) -> set[str]:
    """The local variables that may be read after the top of the loop before they are written again."""
    count = len(instructions)
    live: list[set[str]] = [set() for _ in range(count + 1)]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(count)):
            op, name = instructions[i].opname, instructions[i].argval
            out: set[str] = set()
            if not op.startswith(("RETURN", "RERAISE", "RAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                out |= live[i + 1]
            if instructions[i].target is not None:
                out |= live[indexof[instructions[i].target]]
            entry = getattr(instructions[i], "exn_tab_entry", None)
            if entry is not None:
                out |= live[indexof[entry.target]]
            if isinstance(name, tuple):  # fused instructions: count all as read
                out |= {n for n in name if isinstance(n, str)}
            elif op.startswith(("STORE_FAST", "STORE_DEREF")):
                out = out - {name}
            elif isinstance(name, str) and op.startswith(("LOAD_", "DELETE_")):
                out |= {name}
            if out != live[i]:
                live[i], changed = out, True
    return live[indexof[inst]]


class Emitter:
    """Replaces the traced iterations by one node, and gives every surviving variable its value after the loop."""

    def __init__(self, tx: Any, body: Body, first: list[fx.Node], second: list[fx.Node], index: Index) -> None:
        self.tx, self.body, self.index = tx, body, index
        self.first = {n: i for i, n in enumerate(first)}
        self.second = {n: i for i, n in enumerate(second)}
        self.lasts: list[Ref] = []
        self.examples: list[Any] = []
        self.stacks: list[Ref] = []

    def position(self, a: VariableTracker, b: VariableTracker) -> Ref | None:
        """The body's result that is ``a`` in the first and ``b`` in the second iteration; None if it never changes."""
        na, nb = a.as_proxy().node, b.as_proxy().node
        if na is nb and nb not in self.second:
            return None
        if nb not in self.second or self.first.get(na) != self.second[nb]:
            raise Unequal("a variable does not hold the same result in both iterations")
        if type(a) is not type(b):
            raise Unequal("a variable changes its type")
        return Ref("node", self.second[nb])

    def plan(self, a: VariableTracker, b: VariableTracker, left: int) -> Any:
        """How to build a variable's value after the loop from the two compared iterations."""
        a, b = a.unwrap(), b.unwrap()
        if a is b and not isinstance(a, (TupleVariable,)):
            return ("keep", b)
        symbol = self.index.symbol
        if isinstance(b, SymNodeVariable) and symbol in b.sym_num.node.expr.free_symbols:
            expr = b.sym_num.node.expr
            before = sympy.Integer(a.value) if isinstance(a, ConstantVariable) and type(a.value) is int else None
            if before is None or expr.free_symbols != {symbol} or not sympy.diff(expr, symbol).is_Integer:
                raise Unequal("an integer variable is not affine in the loop index", "QLA103")
            if expr.subs(symbol, self.index.value - self.index.step) != before:
                raise Unequal("an integer variable does not follow the loop index", "QLA103")
            return ("const", int(expr.subs(symbol, self.index.value + self.index.step * (left - 1))))
        if isinstance(a, ConstantVariable) and isinstance(b, ConstantVariable):
            if type(a.value) is not type(b.value) or repr(a.value) != repr(b.value):
                raise Unequal("a Python value changes in the loop independently of the index", "QLA105")
            return ("keep", b)
        if isinstance(a, TensorVariable) and isinstance(b, TensorVariable):
            ref = self.position(a, b)
            if ref is None:
                return ("keep", b)
            if ref not in self.lasts:
                example = b.as_proxy().node.meta["example_value"]
                if any(self.index.symbol in _free(d) for d in example.shape):
                    raise Unequal("a variable's shape depends on the loop index", "QLA103")
                self.lasts.append(ref)
                self.examples.append(example)
            return ("last", self.lasts.index(ref))
        if type(a) is TupleVariable and type(b) is TupleVariable and len(a.items) == len(b.items):
            return ("tuple", [self.plan(x, y, left) for x, y in zip(a.items, b.items)])
        if type(a) is type(b) and leaf(a) == leaf(b):
            return ("keep", b)
        raise Unequal(f"a variable of type {type(b).__name__.removesuffix('Variable')} changes in the loop", "QLA105")

    def realise(self, plan: Any, outputs: list[VariableTracker]) -> VariableTracker:
        kind, value = plan
        if kind == "keep":
            return value
        if kind == "const":
            return ConstantVariable.create(value)
        if kind == "last":
            return outputs[value]
        return TupleVariable([self.realise(p, outputs) for p in value], mutation_type=ValueMutationNew())

    def base(self, value: Any) -> Any:
        """An integer for the graph: a constant, or nodes that compute an affine function of an outer index."""
        if isinstance(value, int):
            return value
        (symbol,) = value.free_symbols
        slope = sympy.diff(value, symbol)
        node = next(
            (n for n in self.tx.output.graph.nodes if n.target is loop_index and _expr_is(n, symbol)),
            None,
        )
        if node is None or not slope.is_Integer:
            raise Unequal("an integer depends on several loop indices", "QLA103")
        proxy = fx.Proxy(node, self.tx.output.current_tracer)
        symint = node.meta["example_value"]
        for target, operand in ((operator.mul, int(slope)), (operator.add, int(value.subs(symbol, 0)))):
            proxy = self.tx.output.create_proxy("call_function", target, (proxy, operand), {})
            symint = target(symint, operand)
            proxy.node.meta["example_value"] = symint
        return proxy


def _free(dim: Any) -> set[sympy.Symbol]:
    return dim.node.expr.free_symbols if isinstance(dim, torch.SymInt) else set()


def _expr_is(node: fx.Node, symbol: sympy.Symbol) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


def roll(tx: Any, inst: Any, it: Any, marks: list[Mark], where: str) -> None:
    """Emit the loop for the iterations between ``marks`` and all that are left. Changes nothing if it raises
    Unequal."""
    m0, m1, m2, m3 = marks
    index = m2.index
    assert index is not None
    env = tx.output.shape_env
    new_guards = [str(g.expr) for g in env.guards[m2.guards :] if index.symbol in g.expr.free_symbols]
    if new_guards or index.symbol in env.replacements:
        shown = new_guards[0] if new_guards else f"{index.symbol} == {env.replacements[index.symbol]}"
        raise Unequal(f"the path taken depends on the loop index ({shown})", "QLA103")
    for watched in m2.watched:
        if watched.__dict__.get("_read", True):
            raise Unequal("a list that grows in the loop is read in it", "QLA106")
    for watched in m2.watched:
        watched.release()
    check_unchanged(m1, m2)
    check_unchanged(m2, m3)
    outer = {m.index.symbol for m in State.active if m.index is not None and m is not m2}
    indices = outer | {index.symbol}
    seg1, seg2 = m1.segment(m2), m2.segment(m3)
    body = compare(seg1, seg2, index, outer)
    first, second = kept(seg1, indices), kept(seg2, indices)
    if any(changes_mode(i.target) for i in body.instrs):
        raise Unequal("the loop switches gradient or autocast modes", "QLA105")
    for position, init in zip(body.carry_out, body.carry_in):
        a, b = first[position.index].meta.get("example_value"), init.meta.get("example_value")
        if not same_shape(a, b):
            raise Unequal("a carried value changes its shape or type", "QLA104")

    emitter = Emitter(tx, body, first, second, index)
    left = it.len + 1  # the symbolic iteration stands for itself and all that are left
    live = live_at(tx.instructions, tx.indexof, inst)
    plans: dict[str, Any] = {}
    for name, b in m3.locals.items():
        a = m2.locals.get(name)
        if a is b and not isinstance(b, TupleVariable):
            continue
        if a is None or name not in live:
            plans[name] = None
            if name in live:
                raise Unequal(f"variable {name} appears in the loop", "QLA105")
            continue
        plans[name] = emitter.plan(a, b, left)
    grown: list[tuple[ListVariable, int, list[Ref]]] = []
    for key, (variable, n3) in m3.lists.items():
        if key not in m2.lists or key not in m1.lists:
            continue
        n2, n1 = m2.lists[key][1], m1.lists[key][1]
        if n3 == n2 == n1:
            continue
        if n3 - n2 != n2 - n1:
            raise Unequal("a list grows unevenly", "QLA105")
        refs = []
        own = own_items(variable)
        for a, b in zip(own[n1:n2], own[n2:n3]):
            if not (isinstance(a.unwrap(), TensorVariable) and isinstance(b.unwrap(), TensorVariable)):
                raise Unequal("a list of something other than tensors grows", "QLA105")
            ref = emitter.position(a.unwrap(), b.unwrap())
            if ref is None:
                raise Unequal("a list grows by the same tensor in each iteration", "QLA105")
            example = b.as_proxy().node.meta["example_value"]
            if any(indices & _free(d) for d in example.shape):
                raise Unequal("the items of a list have different shapes", "QLA103")
            refs.append(ref)
        grown.append((variable, n1, refs))
        emitter.stacks.extend(r for r in refs)

    # the first iteration joins the loop if it is the same computation; else it stays in front of it
    seg0 = m0.segment(m1)
    start, initial, bases = m1, body.carry_in, list(body.bases)
    absorbed: list[fx.Node] = [*seg1, *seg2]
    try:
        carries = bind(body, seg0, -1, indices)
        for key, (_, n1) in m1.lists.items():
            if key in m0.lists and any(v is m1.lists[key][0] for v, _, _ in grown):
                refs = next(r for v, _, r in grown if v is m1.lists[key][0])
                if n1 - m0.lists[key][1] != len(refs):
                    raise Unequal("the first iteration appends differently")
        pairs = [(a.meta.get("example_value"), b.meta.get("example_value")) for a, b in zip(carries, body.carry_in)]
        if not all(same_shape(a, b) for a, b in pairs):
            raise Unequal("the first iteration changes a carried value's shape")
        outside = {u for n in seg0 for u in n.users} - set(seg0) - set(seg1) - set(seg2)
        if outside:
            raise Unequal("the first iteration is used elsewhere")
        start, initial, absorbed = m0, carries, [*seg0, *absorbed]
        bases = [b - s for b, s in zip(body.bases, body.slopes)]
    except Unequal as e:
        log.debug("first iteration kept in front of the loop: %s", e)
    if any(set(n.users) - set(absorbed) for n in absorbed):
        raise Unequal("a value of the loop is used outside of it", "QLA105")

    steps = left + (m2.start - start.start) // index.step
    writes, _ = body_writes(body.instrs)
    loop = Loop(
        body=tuple(body.instrs),
        steps=steps,
        carry_out=tuple(body.carry_out),
        lasts=tuple(emitter.lasts),
        stacks=tuple(emitter.stacks),
        slopes=tuple(body.slopes),
        writes=tuple(sorted(writes)),
        source=where,
        name=f"rolled_loop_{State.counter}",
    )
    tracer = tx.output.current_tracer
    proxies = (
        tuple(fx.Proxy(n, tracer) for n in initial),
        tuple(fx.Proxy(n, tracer) for n in body.invs),
        tuple(emitter.base(b) for b in bases),
    )
    examples = [fresh(tx, e) for e in emitter.examples]
    stacked = [fresh(tx, second[r.index].meta["example_value"], steps) for r in emitter.stacks]
    node = tx.output.create_proxy("call_function", loop, proxies, {})
    node.node.meta["example_value"] = (*examples, *stacked)
    outputs = [
        wrap_fx_proxy(
            tx, tx.output.create_proxy("call_function", operator.getitem, (node, i), {}), example_value=example
        )
        for i, example in enumerate((*examples, *stacked))
    ]
    for name, plan in plans.items():
        if plan is None:
            tx.symbolic_locals.pop(name, None)
        else:
            tx.symbolic_locals[name] = emitter.realise(plan, outputs)
    offset = len(examples)
    for variable, n1, refs in grown:
        count = n1 if start is m1 else start.lists[id(variable)][1]
        RolledListVariable.grow(variable, count, outputs[offset : offset + len(refs)], steps)
        offset += len(refs)
    it.start += it.step * it.len
    it.len = 0
    for dead in reversed(absorbed):
        tx.output.graph.erase_node(dead)
