"""Turn two traced iterations of a loop into one body, and check further iterations against it.

Works on FX nodes only and knows nothing of Dynamo. An iteration is a list of consecutive nodes. The second one may have
been traced with a symbolic loop index; integers that are affine in the index become ``(base, slope)`` pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from ..ir import Instr, Loop, Ref


class Unequal(Exception):
    """Two iterations are not the same computation. ``code`` is a refusal code."""

    def __init__(self, reason: str, code: str = "QLA104") -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Index:
    """The symbolic loop index: ``symbol`` took the place of ``value``; the iteration before it had ``value - step``."""

    symbol: sympy.Symbol
    value: int
    step: int


@dataclass
class Body:
    """What two compared iterations have in common. Node lists are positions in either iteration."""

    instrs: list[Instr] = field(default_factory=list)
    carry_out: list[Ref] = field(default_factory=list)
    carry_in: list[fx.Node] = field(default_factory=list)  # value of each carry that the first compared iteration read
    invs: list[fx.Node] = field(default_factory=list)
    bases: list[Any] = field(default_factory=list)  # int or sympy.Expr, in the first compared iteration
    slopes: list[int] = field(default_factory=list)


def symint_expr(value: Any) -> sympy.Expr | None:
    """The expression of a SymInt, or of a node whose example value is one."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def kept(nodes: Iterable[fx.Node], indices: set[sympy.Symbol]) -> list[fx.Node]:
    """The nodes of an iteration without the integer arithmetic on loop indices, which lives in (base, slope) pairs."""
    out = []
    for node in nodes:
        expr = symint_expr(node)
        if expr is not None and expr.free_symbols and expr.free_symbols <= indices:
            continue
        out.append(node)
    return out


def normal(node: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """(op, target, args, kwargs), with ``x[i]`` as ``torch.select(x, 0, i)``, as Dynamo writes it for a symbolic
    ``i``."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        value, index = node.args[0].meta.get("example_value"), node.args[1]
        is_integer = type(index) is int or symint_expr(index) is not None
        if isinstance(value, torch.Tensor) and is_integer:
            return node.op, torch.select, (node.args[0], 0, index), {}
    return node.op, node.target, tuple(node.args), dict(node.kwargs)


class _Comparison:
    def __init__(
        self, first: Sequence[fx.Node], second: Sequence[fx.Node], index: Index | None, outer: set[sympy.Symbol]
    ):
        self.first = {node: i for i, node in enumerate(first)}
        self.second = {node: i for i, node in enumerate(second)}
        self.index = index
        self.indices = outer | ({index.symbol} if index else set())
        self.body = Body()
        self.carry_of: dict[int, int] = {}
        self.inv_of: dict[fx.Node, int] = {}

    def ref(self, a: fx.Node, b: fx.Node) -> Ref:
        if b in self.second:
            if self.first.get(a) != self.second[b]:
                raise Unequal(f"the iterations use different values ({a} and {b})")
            return Ref("node", self.second[b])
        if b in self.first:
            position = self.first[b]
            if a in self.first:
                raise Unequal(f"a value of two iterations ago is used ({a})")
            if position not in self.carry_of:
                self.carry_of[position] = len(self.body.carry_in)
                self.body.carry_in.append(a)
                self.body.carry_out.append(Ref("node", position))
            elif self.body.carry_in[self.carry_of[position]] is not a:
                raise Unequal(f"a carried value is read as two different ones ({a})")
            return Ref("carry", self.carry_of[position])
        if a is not b:
            raise Unequal(f"a value of an earlier iteration is used ({a} and {b})")
        if a not in self.inv_of:
            self.inv_of[a] = len(self.body.invs)
            self.body.invs.append(a)
        return Ref("inv", self.inv_of[a])

    def integer(self, a: Any, b: Any) -> Ref:
        """``a`` in the first and ``b`` in the second iteration are integers; at most ``b`` knows the index symbol."""
        expr_a = symint_expr(a) if not isinstance(a, int) else sympy.Integer(a)
        expr_b = symint_expr(b) if not isinstance(b, int) else sympy.Integer(b)
        if expr_a is None or expr_b is None:
            raise Unequal(f"an integer became something else ({a} and {b})")
        if self.index is None:
            slope = expr_b - expr_a
        else:
            slope = sympy.diff(expr_b, self.index.symbol) * self.index.step
            expected = expr_b.subs(self.index.symbol, self.index.value - self.index.step)
            if sympy.expand(expected - expr_a) != 0:
                raise Unequal(f"an integer does not follow the loop index ({expr_a} and {expr_b})", "QLA103")
        if not isinstance(slope, sympy.Integer):
            raise Unequal(f"an integer is not affine in the loop index ({expr_b})", "QLA103")
        self.body.bases.append(int(expr_a) if isinstance(expr_a, sympy.Integer) else expr_a)
        self.body.slopes.append(int(slope))
        return Ref("int", len(self.body.bases) - 1)

    def is_index_int(self, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        if isinstance(value, int):
            return True
        expr = symint_expr(value)
        return expr is not None and bool(expr.free_symbols) and expr.free_symbols <= self.indices

    def walk(self, a: Any, b: Any) -> Any:
        if self.is_index_int(a) and self.is_index_int(b):
            return self.integer(a, b)
        if isinstance(b, fx.Node):
            if not isinstance(a, fx.Node):
                raise Unequal(f"a constant became a value ({a} and {b})")
            return self.ref(a, b)
        if type(a) is not type(b):
            raise Unequal(f"arguments of different types ({a!r} and {b!r})")
        if isinstance(b, (tuple, list)):
            if len(a) != len(b):
                raise Unequal("argument lists of different lengths")
            items = [self.walk(x, y) for x, y in zip(a, b)]
            return items if isinstance(b, list) else tuple(items)
        if isinstance(b, dict):
            if list(a) != list(b):
                raise Unequal("keyword arguments differ")
            return {key: self.walk(a[key], b[key]) for key in b}
        if isinstance(b, slice):
            return slice(self.walk(a.start, b.start), self.walk(a.stop, b.stop), self.walk(a.step, b.step))
        if a is not b and a != b and not (a != a and b != b):
            raise Unequal(f"constants differ ({a!r} and {b!r})")
        return b

    def same_meta(self, a: fx.Node, b: fx.Node) -> bool:
        va, vb = a.meta.get("example_value"), b.meta.get("example_value")
        if isinstance(va, torch.Tensor) != isinstance(vb, torch.Tensor):
            return False
        if not isinstance(va, torch.Tensor):
            return True
        if va.dtype != vb.dtype or va.dim() != vb.dim() or va.device != vb.device:
            return False
        for x, y in zip(va.shape, vb.shape):
            ex, ey = (v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (x, y))
            if self.index is not None:
                ey = ey.subs(self.index.symbol, self.index.value - self.index.step)
            if sympy.expand(ex - ey) != 0:
                return False
        return True


def same_loop(a: Loop, b: Loop) -> bool:
    """Whether two rolled loops do the same, up to the integers that they are called with."""
    keys = ("body", "steps", "carry_out", "lasts", "stacks", "slopes", "writes")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def same_target(a: Any, b: Any) -> bool:
    return same_loop(a, b) if isinstance(a, Loop) and isinstance(b, Loop) else a == b


def compare(first: Sequence[fx.Node], second: Sequence[fx.Node], index: Index | None, outer: set[sympy.Symbol]) -> Body:
    """One body for both iterations, or :class:`Unequal`. ``outer`` are the symbols of enclosing symbolic loops."""
    indices = outer | ({index.symbol} if index else set())
    first, second = kept(first, indices), kept(second, indices)
    if len(first) != len(second):
        raise Unequal(f"the iterations have {len(first)} and {len(second)} operations")
    if not first:
        raise Unequal("the loop does nothing")
    comparison = _Comparison(first, second, index, outer)
    for a, b in zip(first, second):
        op_a, target_a, args_a, kwargs_a = normal(a)
        op, target, args_b, kwargs_b = normal(b)
        if op not in ("call_function", "call_method") or op_a != op or not same_target(target_a, target):
            raise Unequal(f"different operations ({a.target} and {b.target})")
        if not comparison.same_meta(a, b):
            raise Unequal(f"results of different shape or type ({a} and {b})", "QLA103")
        args = comparison.walk(args_a, args_b)
        kwargs = comparison.walk(kwargs_a, kwargs_b)
        dtype = getattr(b.meta.get("example_value"), "dtype", None)
        comparison.body.instrs.append(Instr(op, target, args, tuple(kwargs.items()), source_of(b), dtype))
    return comparison.body


def bind(body: Body, nodes: Sequence[fx.Node], i: int, indices: set[sympy.Symbol]) -> list[fx.Node]:
    """Check that ``nodes`` are iteration ``i`` of ``body`` (0 = the first compared one); the carries that it reads."""
    nodes = kept(nodes, indices)
    if len(nodes) != len(body.instrs):
        raise Unequal(f"the iterations have {len(nodes)} and {len(body.instrs)} operations")
    position = {node: j for j, node in enumerate(nodes)}
    carries: list[fx.Node | None] = [None] * len(body.carry_out)

    def check(pattern: Any, value: Any) -> None:
        if isinstance(pattern, Ref):
            check_ref(pattern, value)
        elif isinstance(pattern, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(pattern) != len(value):
                raise Unequal("argument lists differ")
            for p, v in zip(pattern, value):
                check(p, v)
        elif isinstance(pattern, slice):
            if not isinstance(value, slice):
                raise Unequal("a slice became something else")
            check((pattern.start, pattern.stop, pattern.step), (value.start, value.stop, value.step))
        elif isinstance(pattern, dict):
            if not isinstance(value, dict) or list(pattern) != list(value):
                raise Unequal("keyword arguments differ")
            check(tuple(pattern.values()), tuple(value.values()))
        elif type(pattern) is not type(value) or (pattern is not value and pattern != value):
            raise Unequal(f"constants differ ({pattern!r} and {value!r})")

    def check_ref(ref: Ref, value: Any) -> None:
        if ref.kind == "int":
            expr = sympy.Integer(value) if type(value) is int else symint_expr(value)
            if expr is None or sympy.expand(body.bases[ref.index] + body.slopes[ref.index] * i - expr) != 0:
                raise Unequal(f"an integer does not follow the loop index ({value})")
        elif ref.kind == "node":
            if not isinstance(value, fx.Node) or position.get(value) != ref.index:
                raise Unequal(f"the iterations use different values ({value})")
        elif ref.kind == "inv":
            if value is not body.invs[ref.index]:
                raise Unequal(f"the iterations use different values ({value})")
        else:
            if not isinstance(value, fx.Node) or value in position or carries[ref.index] not in (None, value):
                raise Unequal(f"a carried value is read as two different ones ({value})")
            carries[ref.index] = value

    for instr, node in zip(body.instrs, nodes):
        op, target, args, kwargs = normal(node)
        if instr.op != op or not same_target(instr.target, target):
            raise Unequal(f"different operations ({instr.target} and {node.target})")
        check(instr.args, args)
        check(dict(instr.kwargs), kwargs)
    if any(carry is None for carry in carries):
        raise Unequal("a carried value is not read")
    return [carry for carry in carries if carry is not None]


def same_shape(a: Any, b: Any) -> bool:
    """Whether a carried value keeps its shape and dtype from one iteration to the next."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.dtype == b.dtype and a.device == b.device and tuple(a.shape) == tuple(b.shape)


def source_of(node: fx.Node) -> str:
    """``file.py:line`` of the user's code that made this node, from the last frame of its stack trace."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return ""
    where = ""
    for line in trace.splitlines():
        line = line.strip()
        if line.startswith('File "'):
            path, _, rest = line[len('File "') :].partition('"')
            number = rest.split("line ", 1)[1].split(",", 1)[0] if "line " in rest else "?"
            where = f"{path}:{number}"
    return where
