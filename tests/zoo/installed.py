"""Gated DeltaNet as the installed packages write it: transformers' eager functions and fla's naive ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from zoo.eager_transformers import MODULES
from zoo.spelling import Spelling


def transformers_functions():
    """``(chunk, recurrent)``, the eager bodies themselves, without the hub's dispatch around them."""
    module = MODULES["qwen3_next"]
    pair = module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule
    return tuple(getattr(fn, "__wrapped__", fn) for fn in pair)


def fla_naive() -> ModuleType:
    """fla's naive.py, loaded by its path: importing its package needs triton, which a CPU machine may lack."""
    package = importlib.util.find_spec("fla")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "ops" / "gated_delta_rule" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_gated_delta_rule", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Looked up once, here: code that is traced must not import modules.
_HF_CHUNK, _HF_RECURRENT = transformers_functions()
_FLA = fla_naive()


def hf_chunk(q, k, v, g, beta, state):
    return _HF_CHUNK(q, k, v, g, beta, initial_state=state, output_final_state=True)


def hf_chunk_normalised(q, k, v, g, beta):
    return _HF_CHUNK(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)


def hf_recurrent(q, k, v, g, beta, state):
    return _HF_RECURRENT(q, k, v, g, beta, state, True)


def fla_recurrent(q, k, v, g, beta, state):
    # the order of beta and g differs between the two functions of that file
    return _FLA.naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=state, output_final_state=True)


def fla_chunk(q, k, v, g, beta, state):
    return _FLA.naive_chunk_gated_delta_rule(
        q, k, v, g, beta, chunk_size=16, initial_state=state, output_final_state=True
    )


SPELLINGS = (
    Spelling("hf_chunk", hf_chunk, initial=True, float32_inside=True),
    Spelling("hf_chunk_normalised", hf_chunk_normalised, normalised=True, float32_inside=True),
    Spelling("hf_recurrent", hf_recurrent, initial=True, float32_inside=True),
    Spelling("fla_recurrent", fla_recurrent, initial=True, float32_inside=True),
    Spelling("fla_chunk", fla_chunk, initial=True, float32_inside=True),
)
