"""Roll a Python loop into one node while Dynamo traces it. The only folder that touches Dynamo's internals.

At the top of every iteration of ``for i in range(...)`` Dynamo executes FOR_ITER. The hook lets two iterations be
traced
as usual, then feeds the third one a *symbolic* index whose range is all that is left. If tracing it adds no guard
and no
replacement on that symbol, then Python took the same path and all shapes were the same for every remaining index; if
its
operations also line up with the iteration before, one body describes them all. Anything else restarts the analysis with
this loop left alone, so that a loop that is not rolled is traced exactly as without us.

What a loop may change, and how it is accounted for: locals and tuples of tensors (last values), lists that only grow
(stacked), integers that are affine in the index, tensors written in place (the body writes to them). Every other change
that is reachable from any frame or from Dynamo's side effects is found by comparing fingerprints, and refuses the roll.
"""

from __future__ import annotations

from .hook import disabled, install, off_reason, take_refusals

__all__ = ["disabled", "install", "off_reason", "take_refusals"]
