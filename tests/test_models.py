"""Unmodified layers of the installed transformers: one graph, one match a layer, values and gradients of eager."""

from __future__ import annotations

import pytest
import torch
from compiled import compile_and_run, run, worst
from zoo.models import MODELS, Model


@pytest.mark.parametrize("T", [70, 128, 300])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_layer_matches_once(model: Model, T: int) -> None:
    module = model.build()
    params = tuple(module.parameters())
    x = model.inputs(seed=T, T=T)
    got = compile_and_run(module, (x,), params=params)
    assert got.report is not None
    assert len(got.report.matches) == model.layers, "\n".join(map(str, got.report.refusals))
    assert got.report.graph_count == 1
    eager = run(module, (x,), params=params)
    assert worst(got.outputs, eager.outputs) <= 2e-5
    assert worst(got.grads, eager.grads) <= 2e-5


def test_nothing_is_computed_beside_the_operator_in_low_precision() -> None:
    """The operator gets the layer's own bfloat16 tensors: no repeated heads, no copies in float32, no norm in front."""
    model = MODELS[0]
    for T in (70, 128):
        module = model.build().to(torch.bfloat16)
        got = compile_and_run(module, (model.inputs(seed=T, T=T, dtype=torch.bfloat16),), grad=False)
        assert got.report is not None
        (match,) = got.report.matches
        assert [a.split(" ")[0] for a in match.absorbed] == ["l2norm", "heads", "up-cast"], match.absorbed


def test_a_training_step_equals_eager() -> None:
    model = next(m for m in MODELS if m.layers == 3)
    x = model.inputs(seed=1, T=70)
    after = []
    for how in ("eager", "compiled"):
        module = model.build()
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        fn = module
        if how == "compiled":
            fn = torch.compile(module, backend="flashqla", fullgraph=True, options={"flashqla.rest": "aot_eager"})
        fn(x).square().mean().backward()
        optimiser.step()
        after.append([p.detach().clone() for p in module.parameters()])
    assert worst(tuple(after[1]), tuple(after[0])) <= 1e-5
