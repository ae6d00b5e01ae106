"""Unmodified layers of the installed transformers: one graph, one match a layer, values and gradients of eager."""

from __future__ import annotations

import pytest
import torch

from compiled import compile_and_run, relative, run, worst
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
    for mine, theirs, budget in zip(got.grads, eager.grads, budgets(model, x)):
        assert mine is not None
        assert relative(mine, theirs) <= budget  # type: ignore[arg-type]


def budgets(model: Model, x: torch.Tensor) -> list[float]:
    """2e-5 for each gradient, or what rounding alone does to it: how far the float64 gradient moves when every input
    and parameter moves by about one float32 rounding, times the number of roundings on the way (about ten).

    The gradients of the gate's parameters need this: the norm behind the recurrence takes the length of its output
    away, so with strong decay they are small differences of large numbers, in eager code as well.
    """
    module = model.build().double()
    exact = run(module, (x.double(),), params=tuple(module.parameters()))
    moved = [0.0] * len(exact.grads)
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        module = model.build().double()

        def nudge(t: torch.Tensor, gen: torch.Generator = gen) -> torch.Tensor:
            return t * (1 + 2.0**-24 * torch.randn(t.shape, generator=gen, dtype=t.dtype))

        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(nudge(parameter))
        other = run(module, (nudge(x.double()),), params=tuple(module.parameters()))
        moved = [max(m, relative(b, a)) for m, a, b in zip(moved, exact.grads, other.grads)]  # type: ignore[arg-type]
    return [max(2e-5, 10 * m) for m in moved]


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
