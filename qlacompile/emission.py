"""Write an operator into a graph: its arguments from a recurrence's roles, its results in the places of the outputs."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from .build import Builder
from .evaluate import VIEWS, hint, is_in, op_name
from .functional import Functional
from .fxtools import written_nodes
from .hoist import hoist
from .ir import Placement, Ref, Spec
from .peel import Peeled, peel
from .recognise import Found

RESET = 1e-20


class Emission:
    def __init__(
        self, build: Builder, functional: Functional, found: Found, epochs: dict[fx.Node, int], at: fx.Node
    ) -> None:
        self.build, self.functional, self.found = build, functional, found
        self.epochs, self.epoch = epochs, epochs[at]
        self.written = {
            root
            for node in functional.source.nodes
            for target in written_nodes(node)
            for root in functional.roots.get(target, ())
        }
        self.absorbed: list[str] = []
        self.names: dict[str, str] = {}
        self.state_example = self._state_example()

    def may_pass(self, node: fx.Node) -> bool:
        """Whether the operator may do a node's work: it runs in the same modes, on memory that nothing writes to."""
        if self.epochs.get(node, self.epoch) != self.epoch:
            return False
        roots = self.functional.roots
        return not any(roots.get(n, set()) & self.written for n in (node, *node.all_input_nodes))

    def source(self, node: fx.Node) -> fx.Node:
        """The source graph's node: for a later version of a written tensor the tensor itself."""
        return self.functional.versions.get(node) or self.functional.origin[node]

    def _state_example(self) -> torch.Tensor | None:
        found = self.found
        node = found.state_in if found.state_in is not None else (found.state_out[0] if found.state_out else None)
        return node.meta.get("example_value") if node is not None else None

    # --- arguments ----------------------------------------------------------------------------------------------------

    def roles(self) -> dict[str, Peeled]:
        """Each role as a node with its placement, with what the operator does itself taken off."""
        found, build = self.found, self.build
        placed: dict[str, Peeled] = {}
        for role, at in found.roles.items():
            if at is None:
                continue
            if isinstance(at, Placement):
                placed[role] = Peeled(self.source(at.key), at.batch, at.time, at.head)
            else:
                assert isinstance(at, Ref) and found.step is not None
                invs = [self.source(n) for n in found.step.nodes]
                placed[role] = hoist(build, found.step, invs, at, role in ("q", "k", "v"))
        return placed

    def operator(self, training: bool) -> tuple[Spec, fx.Node]:
        found, build = self.found, self.build
        placed = self.roles()
        plan = peel(placed, found.scale, self.may_pass)
        self.absorbed = plan.absorbed
        self.names = {role: p.node.name for role, p in plan.roles.items()}
        args = {role: self.arrange(p, role in ("q", "k", "v")) for role, p in plan.roles.items()}
        dtype = args["q"].meta["example_value"].dtype
        for role in ("k", "v"):
            dtype = torch.promote_types(dtype, args[role].meta["example_value"].dtype)
        wide = [e.dtype for e in (self.state_example, self._output_example()) if e is not None]
        if torch.float64 in wide:
            dtype = torch.float64
        for role in ("q", "k", "v"):
            args[role] = build.cast(args[role], dtype)
        for role in ("g", "beta"):
            if role in args and (dtype == torch.float64 or not build.value(args[role]).dtype.is_floating_point):
                args[role] = build.cast(args[role], torch.float64 if dtype == torch.float64 else torch.float32)
        sign = None
        if "g" in args:
            args["g"], sign = self.log_decay(args["g"])
        if sign is not None:
            args["v"] = build.call(torch.mul, args["v"], build.call(torch.unsqueeze, build.cast(sign, dtype), -1))
        state = self.initial_state()
        out_dtype = self.output_dtype(dtype)
        call = build.call(
            torch.ops.qlacompile.gated_delta_rule_v1.default,
            args["q"],
            args["k"],
            args["v"],
            args.get("g"),
            args.get("beta"),
            state,
            None,
            plan.scale,
            plan.eps,
            out_dtype,
            "auto",
            False,
        )
        self.sign = sign
        q, k, v = (args[r].meta["example_value"] for r in ("q", "k", "v"))
        spec = Spec(
            family=found.family,
            form=found.form,
            batch=hint(q.shape[0]),
            seq_len=hint(q.shape[1]),
            k_heads=hint(k.shape[2]),
            v_heads=hint(v.shape[2]),
            key_dim=hint(k.shape[3]),
            value_dim=hint(v.shape[3]),
            dtype=dtype,
            device=q.device,
            state_dtype=torch.float32 if state is None else state.meta["example_value"].dtype,
            has_gate="g" in args,
            has_beta="beta" in args,
            has_initial_state=state is not None,
            qk_l2norm=plan.eps is not None,
            needs_grad=training,
            scale=plan.scale,
        )
        return spec, call

    def arrange(self, p: Peeled, features: bool) -> fx.Node:
        """``[B, T, H(, D)]``"""
        build, node = self.build, p.node
        rank = len(build.shape(node))
        order = [d for d in (p.batch, p.time, p.head) if d is not None] + ([rank - 1] if features else [])
        node = build.permute(node, order)
        if p.batch is None:
            node = build.call(torch.unsqueeze, node, 0)
        return node if p.head is not None else build.call(torch.unsqueeze, node, 2)

    def log_decay(self, g: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """The natural logarithm of the decay, and its sign where it may be negative."""
        build, gate = self.build, self.found.gate
        if gate == "log":
            return g, None
        if gate == "log2":
            return build.call(torch.mul, build.cast(g, torch.float32), math.log(2.0)), None
        if gate == "neg_log":
            return build.call(torch.neg, g), None
        g = build.cast(g, torch.float64 if build.value(g).dtype == torch.float64 else torch.float32)
        sign = None
        if not _never_negative(self.functional, self.found):
            # a_t = s_t |a_t|: with S'_t = (s_1 .. s_t) S_t the recurrence has decay |a_t|, values s v and outputs s o
            negative = build.call(torch.lt, g, 0.0)
            flips = build.cast(build.call(torch.where, negative, -1.0, 1.0), build.value(g).dtype)
            sign = build.call(torch.cumprod, flips, 1)
            g = build.call(torch.mul, g, flips)
        # A decay of exactly zero becomes RESET, and its gradient is that of the decay at RESET: d log(a) = d a / a
        # holds there, while log(0) has no gradient. A state times RESET is below every rounding of what comes later.
        raised = build.call(torch.sub, build.call(torch.clamp_min, g, RESET), g)
        g = build.call(torch.add, g, build.call(torch.detach, raised))
        return build.call(torch.log, g), sign

    def initial_state(self) -> fx.Node | None:
        """``[N, H, K, V]``, or None if the state starts at zero."""
        found = self.found
        if found.state_in is None or is_zero(found.state_in):
            return None
        build = self.build
        before = cast_source(found.state_in)
        node = build.cast(self.source(before), found.state_in.meta["example_value"].dtype)
        rank = len(build.shape(node))
        key_axis, value_axis = (a % rank for a in found.state_in_axes or found.state_axes)
        batch = [d for d in range(rank) if d not in (key_axis, value_axis)]
        node = build.permute(node, [*batch, key_axis, value_axis])
        sizes = build.shape(node)
        if len(batch) == 2:
            return node
        if len(batch) < 2:
            return build.fit(node, [*([1] * (2 - len(batch))), *sizes])
        return build.call(torch.flatten, node, 1, len(batch) - 1)

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The precision that the operator gives its output in: that of the inputs, or float32 if the region did so."""
        example = self._output_example()
        if example is None or example.dtype == dtype or example.dtype.itemsize <= dtype.itemsize:
            return None
        if isinstance(self.found.output, Placement) and _rounded_later(self.found.output.key, dtype):
            return None
        return example.dtype if example.dtype in (torch.float32, torch.float64) else None

    def _output_example(self) -> torch.Tensor | None:
        found = self.found
        if isinstance(found.output, Placement):
            return found.output.key.meta.get("example_value")
        for user in found.anchor.users:
            loop = found.step.loop  # type: ignore[union-attr]
            kind, number = found.output or ("", 0)
            if kind == "stack" and user.args[1] == len(loop.lasts) + number:
                return user.meta.get("example_value")
            if kind == "write":
                inv = found.step.written[number].inv  # type: ignore[union-attr]
                return found.anchor.args[1][inv].meta.get("example_value")
        return None

    # --- results ------------------------------------------------------------------------------------------------------

    def result(self, which: str, call: fx.Node) -> fx.Node:
        """An output in the layout that the region gave it; contiguous if it was, since later views may need that."""
        node = self.laid_out(which, call)
        example = self._state_out_example() if which == "state" else self._output_example()
        if example is None or which == "last" or not example.is_contiguous() or self.build.value(node).is_contiguous():
            return node
        return self.build.call(torch.clone, node, memory_format=torch.contiguous_format)

    def _state_out_example(self) -> torch.Tensor | None:
        return self.found.state_out[0].meta.get("example_value") if self.found.state_out else None

    def laid_out(self, which: str, call: fx.Node) -> fx.Node:
        build, found = self.build, self.found
        node = build.call(operator.getitem, call, 1 if which == "state" else 0)
        if which == "state":
            return self.final_state(node)
        if self.sign is not None:
            signs = build.call(torch.unsqueeze, build.cast(self.sign, build.value(node).dtype), -1)
            node = build.call(torch.mul, node, signs)
        if isinstance(found.output, Placement):
            example = found.output.key.meta["example_value"]
            at = found.output
            if at.head is None:
                node = build.call(torch.squeeze, node, 2)
            if at.batch is None:
                node = build.call(torch.squeeze, node, 0)
            have = [d for d in (at.batch, at.time, at.head) if d is not None]
            order = [have.index(d) for d in range(len(have))] + [len(have)]
            return build.cast(build.permute(node, order), example.dtype)
        return self.loop_output(which, node)

    def loop_output(self, which: str, node: fx.Node) -> fx.Node:
        """The output of a token loop as the loop left it: stacked along a new axis, or written into a buffer."""
        build, found = self.build, self.found
        assert found.step is not None and isinstance(found.output, tuple)
        kind, number = found.output
        example = self._output_example()
        assert example is not None
        stepwise = build.permute(node, [1, 0, 2, 3])
        if which == "last":
            last = build.call(torch.select, stepwise, 0, found.steps - 1)
            want = next(
                list(u.meta["example_value"].shape)
                for u in found.anchor.users
                if u.args[1] < len(found.step.loop.lasts)
                and found.step.loop.lasts[u.args[1]]
                == found.step.output_refs[found.step.output_where.index(found.output)]
            )
            return build.cast(build.fit(last, want), example.dtype)
        if kind == "stack":
            return build.cast(build.fit(stepwise, list(example.shape)), example.dtype)
        access = found.step.written[number]
        buffer = self.source(found.anchor.args[1][access.inv])
        shape = list(example.shape)
        rest = [s for d, s in enumerate(shape) if d != access.axis]
        value = build.cast(build.fit(stepwise, [found.steps, *rest]), example.dtype)
        if access.slope < 0:
            value = build.call(torch.flip, value, [0])
        order = list(range(1, len(shape)))
        order.insert(access.axis, 0)
        value = build.permute(value, order)
        whole = (
            access.base in (0, shape[access.axis] - 1) and abs(access.slope) == 1 and found.steps == shape[access.axis]
        )
        plain = all(isinstance(a, slice) and a == slice(None) for i, a in enumerate(access.index) if i != access.entry)
        if whole and plain:
            return value
        low = min(access.base, access.base + access.slope * (found.steps - 1))
        high = max(access.base, access.base + access.slope * (found.steps - 1)) + 1
        return build.call(
            torch.ops.aten.slice_scatter.default, buffer, value, access.axis, low, high, abs(access.slope)
        )

    def final_state(self, node: fx.Node) -> fx.Node:
        build, found = self.build, self.found
        if self.sign is not None:
            last = build.call(torch.select, self.sign, 1, -1)
            node = build.call(
                torch.mul, node, build.cast(build.fit(last, [*build.shape(last), 1, 1]), build.value(node).dtype)
            )
        example = found.state_out[0].meta["example_value"]
        rank = example.dim()
        key_axis, value_axis = (a % rank for a in found.state_axes)
        batch = [d for d in range(rank) if d not in (key_axis, value_axis)]
        sizes = list(example.shape)
        order = [*batch, key_axis, value_axis]
        node = build.fit(node, [sizes[d] for d in order])
        return build.cast(build.permute(node, [order.index(d) for d in range(rank)]), example.dtype)


def cast_source(node: fx.Node) -> fx.Node:
    """Behind ``state.to(other)``: what is cast, as ``other`` may be a value of the region and only lends its dtype."""
    if node.op == "call_method" and node.target in ("to", "type_as") and len(node.all_input_nodes) > 1:
        return node.all_input_nodes[0]
    return node


def _rounded_later(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether everything that uses a value first rounds it to ``dtype``: then it may come in that precision at once."""
    todo, seen = list(node.users), set()
    while todo:
        user = todo.pop()
        if user in seen:
            continue
        seen.add(user)
        value = user.meta.get("example_value")
        if user.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor):
            return False
        if value.dtype == dtype:
            continue
        if not is_in(user.target, VIEWS):
            return False
        todo += user.users
    return bool(seen)


def is_zero(node: fx.Node) -> bool:
    while node.op in ("call_function", "call_method") and is_in(node.target, VIEWS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op in ("call_function", "call_method") and op_name(node.target) in ("zeros", "new_zeros", "zeros_like")


def _never_negative(functional: Functional, found: Found) -> bool:
    """Whether the linear decay comes from an operation that gives no negative numbers."""
    at = found.roles["g"]
    if isinstance(at, Ref):
        assert found.step is not None
        if at.kind == "node" and at.index not in found.step.reads:
            return op_name(found.step.loop.body[at.index].target) in ("sigmoid", "exp", "exp2")
        inv = at.index if at.kind == "inv" else found.step.reads[at.index].inv
        node = found.step.nodes[inv]
    else:
        node = at.key
    while node.op in ("call_function", "call_method") and is_in(node.target, VIEWS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op in ("call_function", "call_method") and op_name(node.target) in ("sigmoid", "exp", "exp2", "softmax")
