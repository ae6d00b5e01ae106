"""A second, independent check: loops run on sympy symbols at K = V = 2 equal the family's symbolic step exactly."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch

import qlacompile.backend  # noqa: F401  (registers the operators)
from qlacompile.evaluate import op_name
from qlacompile.explain.collect import collecting
from qlacompile.ir import Loop, Ref, resolve
from qlacompile.patterns.statement import step, symbols
from zoo import token_algebra, token_loops

NAMES = ("list_stack", "list_cat", "preallocated", "scale_in_step", "matmul", "erase_then_write", "negative_error")
SPELLINGS = {s.name: s for s in (*token_loops.SPELLINGS, *token_algebra.SPELLINGS)}


def capture(fn, args) -> tuple[Loop, dict[str, object]]:
    """The rolled loop of ``fn`` and its bases, and which placeholder each invariant comes from."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    backend._qlacompile_roll = True
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    (node,) = [n for n in graphs[0].graph.nodes if isinstance(n.target, Loop)]
    return node.target, node


def numpy_op(name, args, kwargs):
    """The operation on arrays of sympy expressions."""
    if name == "exp":
        return np.vectorize(sympy.exp, otypes=[object])(args[0])
    if name in ("mul", "add", "sub", "truediv", "div", "matmul", "neg"):
        ops = {"mul": "__mul__", "add": "__add__", "sub": "__sub__", "truediv": "__truediv__", "div": "__truediv__"}
        if name == "matmul":
            return args[0] @ args[1]
        if name == "neg":
            return -args[0]
        if "alpha" in kwargs:
            args = (args[0], args[1] * kwargs["alpha"])
        left = args[0] if isinstance(args[0], np.ndarray) else np.asarray(args[0], dtype=object)
        return getattr(left, ops[name])(args[1])
    if name == "sum":
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        return args[0].sum(axis=dim)
    if name == "einsum":
        return np.einsum(args[0], *args[1:], optimize=False)
    if name == "unsqueeze":
        return np.expand_dims(args[0], args[1] if len(args) > 1 else kwargs["dim"])
    if name == "squeeze":
        return args[0].squeeze(args[1] if len(args) > 1 else None)
    if name == "transpose":
        return np.swapaxes(args[0], args[1], args[2])
    if name in ("view", "reshape"):
        return args[0].reshape(args[1:] if isinstance(args[1], int) else args[1])
    if name == "getitem":
        return args[0][args[1]]
    if name == "select":
        return np.take(args[0], args[2], axis=args[1])
    if name in ("clone", "contiguous"):
        return args[0].copy()
    raise NotImplementedError(name)


@pytest.mark.parametrize("name", NAMES)
def test_loop_is_the_statement(name: str) -> None:
    spelling = SPELLINGS[name]
    args = spelling.make(seed=1, B=1, T=8, Hk=1, K=2, V=2)
    loop, node = capture(spelling.fn, args)
    x = symbols(2, 2)
    data = {"l_q_": x["q"], "l_k_": x["k"], "l_v_": x["v"], "l_g_": x["g"], "l_beta_": x["beta"]}

    def value(inv):
        """An array of symbols with the shape of the invariant: the same symbols at every time."""
        shape = tuple(inv.meta["example_value"].shape)
        factor = 1
        while inv.op != "placeholder" and inv.name not in data and op_name(inv.target) in ("mul", "truediv", "div"):
            number = sympy.nsimplify(inv.args[1])
            factor = factor * number if op_name(inv.target) == "mul" else factor / number
            inv = inv.args[0]
        if inv.name not in data:
            return np.zeros(shape, dtype=object)
        symbol = data[inv.name]
        entries = np.array(symbol.tolist() if hasattr(symbol, "tolist") else [[symbol]], dtype=object).ravel()
        return np.broadcast_to(entries * factor if len(shape) == 4 else entries[0] * factor, shape).copy()

    def oriented(state):
        return state.T if spelling.state == "VK" else state

    env = {Ref("inv", j): value(inv) for j, inv in enumerate(node.args[1])}
    env[Ref("carry", 0)] = np.array(oriented(x["S"]).tolist(), dtype=object).reshape(1, 1, 2, 2)
    env.update({Ref("int", j): base for j, base in enumerate(node.args[2])})
    outputs = list(loop.stacks)
    for j, instr in enumerate(loop.body):
        if op_name(instr.target) == "setitem":
            outputs.append(instr.args[2])
            continue
        call_args = resolve(instr.args, env.__getitem__)
        kwargs = {k: resolve(v, env.__getitem__) for k, v in instr.kwargs}
        env[Ref("node", j)] = numpy_op(op_name(instr.target), call_args, kwargs)
    state, output = step(x, "log", sympy.nsimplify(2**-0.5) if spelling.scaled else 1)
    got = oriented(sympy.Matrix(2, 2, list(np.asarray(env[loop.carry_out[0]]).ravel())))
    assert (got - state).applyfunc(sympy.simplify) == sympy.zeros(2, 2)
    (ref,) = outputs
    out = sympy.Matrix(2, 1, list(np.asarray(env[ref]).ravel()))
    difference = (out - output).applyfunc(lambda e: sympy.simplify(sympy.nsimplify(e, rational=False)))
    values = {s: 0.3 + 0.1 * i for i, s in enumerate(sorted(difference.free_symbols, key=str))}
    assert all(abs(float(sympy.N(e.subs(values)))) < 1e-12 for e in difference)


def test_statement_is_in_the_report() -> None:
    spelling = SPELLINGS["list_stack"]
    with collecting() as collector:
        torch.compile(spelling.fn, backend="flashqla", options={"flashqla.rest": "eager"})(*spelling.make(T=8))
    (match,) = collector.report().matches
    assert "S' = " in match.proof.statement
    assert "exp(g)" in match.proof.statement
    assert "beta" in match.proof.statement
