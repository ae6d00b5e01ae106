"""The gated delta rule in sympy: the sentence for the report, and the symbolic step that tests compare loops with."""

from __future__ import annotations

from typing import Any

GATES = {"log": "exp(g)", "log2": "2**g", "neg_log": "exp(-g)", "linear": "g", "none": "1"}


def symbols(keys: int, values: int) -> dict[str, Any]:
    """Symbols for one step: S ``[K, V]``, q and k ``[K, 1]``, v ``[V, 1]``, and the scalars g and beta."""
    import sympy

    return {
        "S": sympy.Matrix(keys, values, lambda i, j: sympy.Symbol(f"S{i}{j}")),
        "q": sympy.Matrix(keys, 1, lambda i, j: sympy.Symbol(f"q{i}")),
        "k": sympy.Matrix(keys, 1, lambda i, j: sympy.Symbol(f"k{i}")),
        "v": sympy.Matrix(values, 1, lambda i, j: sympy.Symbol(f"v{i}")),
        "g": sympy.Symbol("g"),
        "beta": sympy.Symbol("beta"),
    }


def step(x: dict[str, Any], gate: str, scale: Any) -> tuple[Any, Any]:
    """The new state ``a (I - beta k k^T) S + beta k v^T`` and the output ``scale S'^T q`` as sympy matrices."""
    import sympy

    alpha = sympy.sympify(GATES[gate])
    identity = sympy.eye(x["k"].rows)
    state = alpha * (identity - x["beta"] * x["k"] * x["k"].T) * x["S"] + x["beta"] * x["k"] * x["v"].T
    return state, scale * state.T * x["q"]


def sentence(gate: str, has_beta: bool, scale: float) -> str:
    """The identity that was proven, for people."""
    import sympy

    keys, values = sympy.symbols("K V", integer=True, positive=True)
    matrix = sympy.MatrixSymbol
    state, q, k, v = matrix("S", keys, values), matrix("q", keys, 1), matrix("k", keys, 1), matrix("v", values, 1)
    alpha = sympy.sympify(GATES[gate])
    beta = sympy.Symbol("beta") if has_beta else sympy.Integer(1)
    new = alpha * (sympy.Identity(keys) - beta * k * k.T) * state + beta * k * v.T
    return f"S' = {new}; o = {scale * matrix('S_', keys, values).T * q}".replace("S_", "S'")
