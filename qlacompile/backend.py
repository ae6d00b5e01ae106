"""``torch.compile(model, backend="flashqla")``: the only file that knows the order of the stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import ops  # noqa: F401  (registers the operators that rewrite inserts)
from .errors import StrictError
from .explain.collect import Recorder, recorder
from .functional import functionalise
from .ir import Match, Proof, Refusal
from .lower import choose
from .options import Options
from .prove import prove
from .recognise import Found, recognise
from .rest import compile_rest, unroll
from .rewrite import Rewritten, rewrite
from .roll import dynamo as roll
from .roll.graph import reroll
from .roll.prepare import copy_graph, has_repetition
from .verify import once

log = logging.getLogger("qlacompile")


def flashqla(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo traced.

    ``mode`` and the options without the prefix ``flashqla.`` go to inductor. Raises OptionError for an option that is
    not known, and with ``flashqla.strict`` StrictError when a recurrence was found but not fused.
    """
    chosen, inductor_options = Options.parse(options)
    with recorder() as record:
        record.add_graph(len(gm.graph.nodes))
        for refusal in roll.take_refusals():
            record.add_refusal(refusal)
        original = fx.GraphModule(gm, copy_graph(gm.graph)) if chosen.verify == "once" else None
        replaced = 0
        for module in [gm, *_subgraphs(gm)]:
            replaced += fuse(module, chosen, record) + fuse_unrolled(module, chosen, record)
        report = record.report()
        if chosen.strict and (report.refusals or not report.matches):
            raise StrictError("QLA003", _why(report.refusals))
        with record.stage("rest"):
            for module in [gm, *_subgraphs(gm)]:
                if unroll(module) or replaced:
                    module.graph.lint()
                    module.recompile()
            compiled = compile_rest(gm, example_inputs, chosen.rest, mode, inductor_options)
        if original is None or not replaced:
            return compiled
        unroll(original)
        original.recompile()
        return once(compiled, original)


flashqla._qlacompile_roll = True  # type: ignore[attr-defined]


def fuse(gm: fx.GraphModule, options: Options, record: Recorder) -> int:
    """Find, prove and replace every recurrence of one graph; returns how many were replaced."""
    count = 0
    refused: set[str] = set()  # by name: names survive a rollback
    training = torch.is_grad_enabled()
    device = _device(gm)
    while True:
        # after a rewrite the graph is looked at afresh, since positions and uses have changed
        with record.stage("recognise"):
            functional = functionalise(gm.graph)
            found = _next(functional, device, refused, record)
        if found is None:
            return count
        with record.stage("prove"):
            proof = prove(found, device)
        if isinstance(proof, Refusal):
            refused.add(functional.origin[found.anchor].name)
            record.add_refusal(proof)
            continue
        with record.stage("rewrite"):
            before = copy_graph(gm.graph)
            try:
                result = rewrite(gm, functional, found, training)
            except Exception as e:  # whatever goes wrong here must not keep a correct program from running
                gm.graph = before
                log.debug("rewrite failed", exc_info=True)
                result = Refusal("QLA301", f"the region can not be replaced ({type(e).__name__}: {e})", found.source)
        if isinstance(result, Refusal):
            refused.add(functional.origin[found.anchor].name)
            record.add_refusal(result)
            continue
        with record.stage("lower"):
            record.add_match(_lower(result, found, proof, options))
        refused.add(functional.origin[found.anchor].name)  # replaced; were it still there, it would be found for ever
        count += 1


def fuse_unrolled(gm: fx.GraphModule, options: Options, record: Recorder) -> int:
    """The same for loops that were traced unrolled. The graph only changes if one of them is replaced."""
    with record.stage("roll"):
        if not has_repetition(gm.graph):
            return 0
        attempt = fx.GraphModule(gm, copy_graph(gm.graph))
        if not reroll(attempt):
            return 0
    count = fuse(attempt, options, record)
    if count:
        gm.graph = attempt.graph
    return count


def _next(functional: Any, device: torch.device, refused: set[str], record: Recorder) -> Found | None:
    for result in recognise(functional, device, refused):
        if isinstance(result, Refusal):
            record.add_refusal(result)
        else:
            return result
    return None


def _lower(result: Rewritten, found: Found, proof: Proof, options: Options) -> Match:
    choice = choose(result.spec, options.kernels)
    args = list(result.node.args)
    args[-2], args[-1] = choice.kernel, options.strict
    result.node.args = tuple(args)
    return Match(
        family=found.family,
        form=found.form,
        steps=found.steps,
        source=found.source,
        roles=result.roles,
        kernel=choice.kernel,
        kernel_refusals=choice.refusals,
        absorbed=result.absorbed,
        proof=proof,
        scale=result.spec.scale,
    )


def _device(gm: fx.GraphModule) -> torch.device:
    """Where proofs are evaluated: on the graph's GPU if it has one, since a long sequence takes long elsewhere."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return torch.device("cpu")


def _subgraphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Bodies of higher-order operators (checkpointing, cond): graphs of their own."""
    return [m for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm]


def _why(refusals: tuple[Refusal, ...]) -> str:
    if not refusals:
        return "no recurrence was found; see qlacompile.explain(fn)(*args)"
    return "not everything was fused:\n" + "\n".join(f"  {r}" for r in refusals)


roll.install()
