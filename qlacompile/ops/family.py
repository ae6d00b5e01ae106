"""From the declaration of a family to its operators: schemas, fakes, autograd, vmap, and the call of a kernel.

Two operators a family, ``qlacompile::<name>_v<version>`` and ``qlacompile::<name>_backward_v<version>``. They are
functional, take inputs of any strides and return new contiguous tensors, so that a compiler may lay out their inputs as
it likes. The version is part of the name because compiled graphs are kept on disk under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError
from ..ir import Kernel, Spec
from .run import run

Tensors = Sequence["torch.Tensor | None"]
Shape = tuple[Any, ...]

_library = torch.library.Library("qlacompile", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


@dataclass(frozen=True)
class Family:
    """What has to be said about a family; :func:`register` derives the rest.

    ``tensors`` are the tensor arguments in order, with a ``?`` if they may be ``None``. The first dimension of each is
    the batch, except for those in ``unbatched``. ``parameters`` are ``(name, schema type)`` of the others.
    ``check(tensors, parameters)`` raises ``ArgumentError`` and must not compare symbolic sizes;
    ``describe(tensors, out_dtype)`` gives shape and dtype of each output; ``spec(tensors, parameters, needs_grad)``
    describes a call to the kernels.
    """

    name: str
    version: int
    tensors: tuple[str, ...]
    differentiable: tuple[str, ...]
    unbatched: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]  # names of the incoming gradients of the outputs
    check: Callable[[Tensors, Sequence[Any]], None]
    describe: Callable[[Tensors, torch.dtype | None], tuple[tuple[Shape, torch.dtype], ...]]
    spec: Callable[[Tensors, Sequence[Any], bool], Spec]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.rstrip("?") for t in self.tensors)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Where the differentiable tensors are."""
        return tuple(self.names.index(name) for name in self.differentiable)


def register(family: Family) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Define both operators of a family; returns the callables of the forward and the backward."""
    forward, backward = f"{family.name}_v{family.version}", f"{family.name}_backward_v{family.version}"
    tensors = ", ".join(f"Tensor{'?' if t.endswith('?') else ''} {t.rstrip('?')}" for t in family.tensors)
    grads = ", ".join(f"Tensor? {name}" for name in family.gradients)
    parameters = ", ".join(f"{kind} {name}" for name, kind in family.parameters)
    outputs = ", ".join(f"Tensor {name}" for name in family.outputs)
    n = len(family.differentiable)
    _library.define(
        f"{forward}({tensors}, {parameters}, ScalarType? out_dtype, str kernel, bool strict) -> ({outputs})", tags=_TAGS
    )
    _library.define(
        f"{backward}({tensors}, {grads}, {parameters}, str kernel, bool strict, bool[{n}] needs)"
        f" -> ({', '.join(['Tensor'] * n)})",
        tags=_TAGS,
    )
    forward_op = getattr(torch.ops.qlacompile, forward).default
    backward_op = getattr(torch.ops.qlacompile, backward).default

    functions = _Functions(family, forward_op, backward_op)
    for name, impl, fake, vmap in (
        (forward, functions.forward, functions.forward_fake, functions.forward_vmap),
        (backward, functions.backward, functions.backward_fake, functions.backward_vmap),
    ):
        _library.impl(name, impl, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qlacompile::{name}", fake, lib=_library)
        torch.library.register_vmap(f"qlacompile::{name}", vmap, lib=_library)
    torch.library.register_autograd(
        f"qlacompile::{forward}", functions.differentiate, setup_context=functions.save, lib=_library
    )
    torch.library.register_autograd(f"qlacompile::{backward}", functions.refuse_second, lib=_library)
    return forward_op, backward_op


@dataclass(frozen=True)
class _Functions:
    """The functions that are registered for the operators of a family; their arguments are those of the schemas."""

    family: Family
    forward_op: Callable[..., Any]
    backward_op: Callable[..., Any]

    def forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        tensors, parameters, (out_dtype, kernel, strict) = self._split(args, 0)
        family = self.family
        family.check(tensors, parameters)
        (_, dtype), *_ = family.describe(tensors, out_dtype)
        with _no_autocast(tensors):
            outputs = run(
                family.name,
                kernel,
                strict,
                lambda: family.spec(tensors, parameters, False),
                lambda k: k.forward(*tensors, *parameters, dtype),
            )
        return tuple(x.contiguous() for x in outputs)

    def forward_fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        tensors, parameters, (out_dtype, _, _) = self._split(args, 0)
        self.family.check(tensors, parameters)
        like = tensors[0]
        return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in self.family.describe(tensors, out_dtype))

    def backward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        family, count = self.family, len(self.family.gradients)
        tensors, parameters, (kernel, strict, needs) = self._split(args, count)
        grads = args[len(tensors) : len(tensors) + count]
        family.check(tensors, parameters)

        def call(k: Kernel) -> tuple[torch.Tensor | None, ...]:
            return k.backward(*tensors, *grads, *parameters, needs)

        with _no_autocast(tensors):
            found = run(family.name, kernel, strict, lambda: family.spec(tensors, parameters, True), call)
        return tuple(
            _no_gradient(tensors) if grad is None or not need else grad.contiguous() for grad, need in zip(found, needs)
        )

    def backward_fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        tensors, _, (_, _, needs) = self._split(args, len(self.family.gradients))
        inputs = [tensors[i] for i in self.family.inputs]
        return tuple(
            x.new_empty(x.shape) if need and x is not None else _no_gradient(tensors) for x, need in zip(inputs, needs)
        )

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, parameters, (_, kernel, strict) = self._split(inputs, 0)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # an output that is not used costs nothing in the backward
        ctx.call = (*parameters, kernel, strict)

    def differentiate(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs = self.family.inputs
        result: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        needs = [ctx.needs_input_grad[i] for i in inputs]
        if any(needs) and any(grad is not None for grad in grads):
            found = self.backward_op(*ctx.saved_tensors, *grads, *ctx.call, needs)
            for i, need, grad in zip(inputs, needs, found):
                result[i] = grad if need else None
        return tuple(result)

    def refuse_second(self, ctx: Any, *grads: Any) -> None:
        raise ArgumentError(
            "QLA405",
            f"{self.family.name} has no second derivative: found a gradient of its gradient, expected none. "
            "Differentiate the eager code instead, outside of torch.compile(backend='flashqla').",
        )

    def forward_vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        return self._vmap(self.forward_op, info, in_dims, args, len(self.family.tensors))

    def backward_vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        count = len(self.family.tensors) + len(self.family.gradients)
        return self._vmap(self.backward_op, info, in_dims, args, count)

    def _vmap(self, op: Callable[..., Any], info: Any, in_dims: Any, args: tuple[Any, ...], count: int) -> Any:
        """Fold the mapped dimension into the batch."""
        names = (*self.family.names, *self.family.gradients)
        folded = list(args)
        for i, name in enumerate(names[:count]):
            if args[i] is None:
                continue
            if name in self.family.unbatched:
                raise ArgumentError(
                    "QLA404",
                    f"{name}: found one inside of torch.vmap, expected none: packed sequences have no batch dimension "
                    "to fold the mapped one into. Pack all sequences into one call instead.",
                )
            x = (
                args[i].expand(info.batch_size, *args[i].shape)
                if in_dims[i] is None
                else args[i].movedim(in_dims[i], 0)
            )
            folded[i] = x.flatten(0, 1)
        outputs = op(*folded)
        dims = [None if x.dim() == 1 else 0 for x in outputs]
        return tuple(x if d is None else x.unflatten(0, (info.batch_size, -1)) for x, d in zip(outputs, dims)), tuple(
            dims
        )

    def _split(self, args: tuple[Any, ...], skip: int) -> tuple[Any, Any, Any]:
        n, p = len(self.family.tensors), len(self.family.parameters)
        return args[:n], args[n + skip : n + skip + p], args[n + skip + p :]


def _no_gradient(tensors: Tensors) -> torch.Tensor:
    """What stands for a gradient that was not asked for: an operator can not return ``None``."""
    like = tensors[0]
    return torch.empty(0) if like is None else like.new_empty(0)


def _no_autocast(tensors: Tensors) -> AbstractContextManager[Any]:
    """Kernels choose their own precisions: autocast must not reach the operations inside."""
    like = tensors[0]
    if like is None or not torch.is_autocast_enabled(like.device.type):
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)
