"""What the stages need to know about single operations of an FX graph: what they write to, alias, and cost to
replace."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx

from .ir import Instr, Loop, Ref


def words(text: str) -> frozenset[str]:
    """The words of a long list of names."""
    return frozenset(text.split())


_INPLACE_OPERATORS = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
}

# Operations whose result may share memory with their first argument. `getitem` of a tensor is a view unless it is
# indexed by a tensor; treating the copy as a view is the careful direction.
VIEW_METHODS = words(
    """
    view reshape transpose permute movedim moveaxis swapaxes swapdims unsqueeze squeeze expand expand_as
    view_as reshape_as narrow select flatten unflatten chunk split unbind t T mT contiguous to type float
    double half bfloat16 detach diagonal real adjoint ravel unfold as_strided tensor_split broadcast_to
    requires_grad_ slice type_as __getitem__ cpu cuda alias view_as_real split_with_sizes hsplit vsplit
    dsplit select_copy
    """
)
_MAYBE_COPIES = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous"])
_GRAD_MODES = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_functorch", "_enter_inference_mode"}


def target_name(target: Any) -> str:
    """The bare name of an operation: ``"matmul"`` for the method, the torch function and the ATen overload alike."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def written_args(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation changes in place."""
    if isinstance(target, Loop):
        return [args[1][i] for i in target.writes]
    if target is operator.setitem or target in _INPLACE_OPERATORS:
        return [args[0]]
    written: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        for i, spec in enumerate(target._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                value = kwargs.get(spec.name, args[i] if i < len(args) else None)
                if value is not None:
                    written.append(value)
        return written
    name = target_name(target)
    if (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in ("__invert__", "__index__", "__int__", "__iter__")
        )
    ):
        written.append(args[0] if args else next(iter(kwargs.values())))
    if kwargs.get("inplace") is True:
        written.append(args[0] if args else kwargs["input"])
    elif op == "call_function" and inspect.isfunction(target) and True in args:
        # F.relu(x, True): the position of `inplace` is only known from the signature
        names = list(inspect.signature(target).parameters)
        if any(n == "inplace" and i < len(args) and args[i] is True for i, n in enumerate(names)):
            written.append(args[0])
    out = kwargs.get("out")
    if out is not None:
        written.extend(out if isinstance(out, (tuple, list)) else [out])
    return written


def may_alias(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the result of an operation may share memory with."""
    name = target_name(target)
    if isinstance(target, Loop) or target is operator.setitem:
        return []
    written = written_args(op, target, args, kwargs)
    if written:
        return written
    if target is operator.getitem or target is getattr or name in VIEW_METHODS:
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        return [first] if first is not None else []
    if isinstance(target, torch._ops.OpOverload):
        return [
            args[i] for i, spec in enumerate(target._schema.arguments) if spec.alias_info is not None and i < len(args)
        ]
    return []


def body_writes(body: Iterable[Instr]) -> tuple[set[int], set[int]]:
    """Which invariants and which carries a loop body changes in place: (invariant indices, carry indices)."""
    roots: list[set[Ref]] = []
    invs: set[int] = set()
    carries: set[int] = set()

    def root(value: Any) -> set[Ref]:
        if isinstance(value, (tuple, list)):
            return set().union(*map(root, value)) if value else set()
        if not isinstance(value, Ref) or value.kind == "int":
            return set()
        return roots[value.index] if value.kind == "node" else {value}

    for instr in body:
        kwargs = dict(instr.kwargs)
        for value in written_args(instr.op, instr.target, instr.args, kwargs):
            for ref in root(value):
                (invs if ref.kind == "inv" else carries).add(ref.index)
        aliased = [root(value) for value in may_alias(instr.op, instr.target, instr.args, kwargs)]
        roots.append(set().union(*aliased) if aliased else set())
    return invs, carries


def changes_mode(target: Any) -> bool:
    """Whether an operation switches gradient, autocast or another global mode."""
    name = target_name(target)
    return name in _GRAD_MODES or name.startswith(("_set_", "_enter_", "_exit_"))


def alias_roots(graph: fx.Graph, without: Set[tuple[fx.Node, fx.Node]] = frozenset()) -> dict[fx.Node, set[fx.Node]]:
    """For each node the nodes whose memory it may share (itself, if it owns its memory).

    ``without`` are (user, used) pairs that do not count, because the user is about to use something else.
    """
    roots: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        found: set[fx.Node] = set()
        if node.op in ("call_function", "call_method"):
            for value in may_alias(node.op, node.target, tuple(node.args), dict(node.kwargs)):
                fx.node.map_arg(value, lambda n: None if (node, n) in without else found.update(roots[n]))  # noqa: B023
        if found and target_name(node.target) in _MAYBE_COPIES and len(found) == 1:
            (source,) = found
            # `zeros(..).to(x)` may be the zeros themselves, but nobody else can see them
            if (
                source in node.all_input_nodes
                and len(source.users) == 1
                and source.op not in ("placeholder", "get_attr")
            ):
                found = set()
        roots[node] = found or {node}
    return roots


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that ``node`` changes in place."""
    found: list[fx.Node] = []
    if node.op in ("call_function", "call_method"):
        for value in written_args(node.op, node.target, tuple(node.args), dict(node.kwargs)):
            fx.node.map_arg(value, found.append)
    return found
