"""What the kernels share: tile sizes, the gate's floor, and how the compiler is set for each of them."""

C = 64  # tokens a chunk
VB = 64  # columns of the state a block owns
MIN_LOG_DECAY = -100.0  # exp(-100) is zero to fp32, and 64 of them summed still leave 11 bits for the differences

# Rows of `gates`, a tile per chunk and v head: cumulative log decay G, beta, exp(G), exp(G_last - G), exp(G - G_first).
GATE, BETA, DECAY, REST, LEAD = range(5)
GATES = 5

# Kernels with a loop over tiles use the compiler's own warp specialisation: a producer warpgroup loads them with the
# bulk copy engine, which also fills what lies behind the last token with zeros. The other two have no such loop.
WARP_SPECIALISED: dict[str, object] = {}
PLAIN: dict[str, object] = {"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True}
PASS_CONFIGS = {
    "solve": PLAIN,
    "states": WARP_SPECIALISED,
    "output": WARP_SPECIALISED,
    "scores": PLAIN,
    "reverse": WARP_SPECIALISED,
    "gradients": WARP_SPECIALISED,
}
