"""Run parts of a graph on float64 data, and say which operations such an evaluation is evidence for.

The proof of a match rests on this: between its inputs and its outputs a region may contain only operations of
:data:`ANALYTIC`. Their compositions are real-analytic functions wherever they are defined, and two analytic functions
that agree on random points of an open set agree everywhere (with probability one a disagreement shows). Piecewise
operations (clamp, relu, where on data, rounding) would break that, so a region that contains one is refused; in
front of the region's inputs they may stand, because there they are kept as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from .fxtools import target_name, words
from .ir import Instr, Loop

VIEWS = words(
    """
    view reshape transpose permute movedim moveaxis swapaxes swapdims unsqueeze squeeze expand expand_as
    view_as reshape_as narrow select flatten unflatten chunk split split_with_sizes unbind t T mT adjoint
    contiguous to type float double half bfloat16 type_as getitem clone diagonal broadcast_to slice alias
    ravel atleast_1d atleast_2d _to_copy unsafe_split dropout_identity
    """
)
CONSTANTS = words(
    """
    zeros ones eye full arange empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full
    new_empty new_tensor tensor linspace scalar_tensor size stride dim numel tril_indices triu_indices
    """
)
ANALYTIC = (
    VIEWS
    | CONSTANTS
    | words(
        """
    add sub rsub mul div true_divide truediv multiply subtract divide neg negative pow square sqrt rsqrt
    reciprocal exp exp2 log log2 sigmoid tanh expm1 log1p matmul bmm mm mv dot einsum outer ger inner
    tensordot vdot vecdot baddbmm addbmm addmm addmv addr addcmul addcdiv kron multi_dot chain_matmul sum
    mean prod cumsum cumprod tril triu masked_fill where pad cat concat concatenate stack hstack vstack
    constant_pad_nd solve_triangular solve inv inverse inv_ex solve_ex triangular_solve matrix_power
    repeat_interleave repeat tile diag diag_embed flip lerp setitem iadd isub imul itruediv copy_ mul_ add_
    sub_ div_ neg_ exp_ masked_fill_ tril_ triu_ fill_ zero_ addcmul_ baddbmm_ index_put index_put_
    slice_scatter select_scatter select_backward logical_not bitwise_not invert lt le gt ge eq ne and_ or_
    logical_and logical_or bool long int norm vector_norm
    """
    )
)
"""Operations whose compositions are analytic. Comparisons and masks are meant for constants; :func:`is_core` checks
that."""

BRANCHED = words(
    """
    sqrt rsqrt norm vector_norm log log2 log1p where masked_fill masked_fill_ lt le gt ge eq ne and_ or_ logical_and
    logical_or logical_not bitwise_not invert bool long int
    """
)
"""Of these, the ones that are not analytic in their arguments everywhere: |x| is the root of a square. They may stand
where their arguments are constants, and in front of a region's inputs."""


def analytic(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is analytic in all of its arguments, wherever it is defined."""
    if isinstance(target, Loop):
        return all(analytic(instr.target, instr.args) for instr in target.body)
    name = op_name(target)
    if name == "pow":
        return len(args) > 1 and isinstance(args[1], (int, float)) and float(args[1]).is_integer()
    return is_in(target, ANALYTIC) and name not in BRANCHED


PROLOGUE = ANALYTIC | words(
    """
    clamp clamp_min clamp_max clip relu silu softplus logsigmoid abs maximum minimum max min normalize
    softmax gelu elu leaky_relu erf sin cos sign round floor ceil rms_norm layer_norm log_softmax amax amin
    mish hardtanh detach nan_to_num logsumexp threshold
    """
)
"""Operations that may stand in front of a region's inputs and are evaluated only to give those inputs values."""

_BOOLEAN = words(
    """
    lt le gt ge eq ne and_ or_ logical_and logical_or logical_not bitwise_not invert bool long int
    """
)
_TO_FLOAT = frozenset({"float", "half", "bfloat16", "double"})
_ATTRIBUTES = frozenset(["mT", "T", "mH", "H", "real", "shape", "ndim"])
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def op_name(target: Any) -> str:
    """The name that :data:`ANALYTIC` knows an operation by."""
    base = getattr(target, "base", None)
    if base is not None and not isinstance(target, torch._ops.OpOverload):
        return op_name(base).removesuffix("_") if not isinstance(base, Loop) else base.name
    name = target_name(target)
    return {"_to_copy": "to", "linalg_inv": "inv", "linalg_solve": "solve", "linalg_inv_ex": "inv_ex"}.get(
        name, name.removeprefix("linalg_")
    )


def is_in(target: Any, names: frozenset[str]) -> bool:
    """Whether an operation (or every operation of a rolled loop) is one of ``names``."""
    if isinstance(target, Loop):
        return all(is_in(instr.target, names) for instr in target.body)
    if target is getattr:  # x.mT and the like; the attribute's name is checked when the node is run
        return True
    base = getattr(target, "base", None)  # a functional form of a writing operation, see functional.py
    if base is not None and not isinstance(target, torch._ops.OpOverload):
        return is_in(base, names)
    return op_name(target) in names


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATS


class Evaluator:
    """Runs nodes and loop instructions in float64 on one device, whatever dtype and device they name."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def adapt(self, value: Any) -> Any:
        """Constants of other precisions and devices become float64 on our device."""
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _FLOATS else value
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(map(self.adapt, value))
        return value

    def call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(map(self.adapt, args))
        kwargs = {k: self.device if k == "device" and v is not None else self.adapt(v) for k, v in kwargs.items()}
        if op == "call_method":
            if target in _TO_FLOAT:
                return args[0].to(torch.float64)
            if target in ("cpu", "cuda"):
                return args[0]
            return getattr(args[0], target)(*args[1:], **kwargs)
        if hasattr(target, "run") and not isinstance(target, torch._ops.OpOverload):  # a rolled loop, functional or not
            return target.run(*args, self.instr)
        if target is getattr and args[1] not in _ATTRIBUTES:
            raise NotImplementedError(f"attribute {args[1]}")
        result = target(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device != self.device:
            result = result.to(self.device)
        return result.double() if is_float(result) and result.dtype != torch.float64 else result

    def instr(self, instr: Instr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(instr.op, instr.target, args, kwargs)

    def run(
        self,
        nodes: Iterable[fx.Node],
        values: dict[fx.Node, Any],
        keep: Callable[[fx.Node], bool] = lambda node: True,
    ) -> dict[fx.Node, Any]:
        """Evaluate ``nodes`` (in graph order) from ``values``; a value is dropped after its last use unless
        ``keep``."""
        nodes = list(nodes)
        last_use: dict[fx.Node, int] = {}
        for i, node in enumerate(nodes):
            for used in node.all_input_nodes:
                last_use[used] = i
        for i, node in enumerate(nodes):
            if node not in values:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self.call(node.op, node.target, args, kwargs)
            for used in node.all_input_nodes:
                if last_use.get(used) == i and not keep(used):
                    values.pop(used, None)
        return values


def hint(value: Any) -> int:
    """The size that a symbolic size has now."""
    if isinstance(value, torch.SymInt):
        node = value.node
        concrete = node.hint if node.hint is not None else node.shape_env.size_hint(node.expr, allow_none=True)
        return int(concrete) if concrete is not None else 8
    return int(value)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The node's shape with symbolic sizes at their hints, or None if it is not a tensor."""
    value = node.meta.get("example_value")
    return tuple(map(hint, value.shape)) if isinstance(value, torch.Tensor) else None


def draw(shape: tuple[int, ...], generator: torch.Generator, magnitude: float, device: torch.device) -> torch.Tensor:
    """Random data for one leaf: symmetric about zero, small enough that long recurrences neither explode nor vanish.

    Vectors get norm ``magnitude * about 1``; per-token scalars get entries up to ``0.1 * magnitude``.
    """
    data = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (data * magnitude).to(device)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
