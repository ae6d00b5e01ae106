"""The fused operators, to be called directly: as in flash-linear-attention, but traceable without a graph break."""

from .api import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .gated_delta_rule import FAMILY, gated_delta_rule, gated_delta_rule_backward

__all__ = [
    "FAMILY",
    "chunk_gated_delta_rule",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "recurrent_gated_delta_rule",
]
