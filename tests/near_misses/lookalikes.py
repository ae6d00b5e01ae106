"""All look-alikes together."""

from near_misses.loops_by_index import BY_INDEX
from near_misses.loops_with_buffers import WITH_BUFFERS
from near_misses.loops_with_containers import WITH_CONTAINERS

LOOKALIKES = (*BY_INDEX, *WITH_CONTAINERS, *WITH_BUFFERS)
