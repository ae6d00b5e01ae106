"""Kernel 2: the scan over chunks. Kernel 3: the output of every chunk, given the state before it.

Imported only when a kernel is built: it needs TileLang.
"""

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .tiles import BETA, DECAY, GATE, GATES, REST, VB, C


def states(K: int, dtype: str, stages: int = 2):
    """One block per (sequence, v head, 64 columns of V). Writes the state before
    each chunk, each chunk's u, and the last state.

    State, x and u are held transposed, ``[V, K]`` and ``[V, C]``: an accumulator cast to the input dtype then is,
    register by register, the left operand of the next product, and nothing on the way from chunk to chunk passes
    through memory.
    """
    B, S, Hk, Hv, NB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "NB", "M", "MB"))

    @T.prim_func
    def gdn_states(
        k: T.Tensor((B, S, Hk, K), dtype),
        v: T.Tensor((B, S, Hv, NB, VB), dtype),
        N: T.Tensor((M, C, C), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
        h0: T.Tensor((B, Hv, K, NB, VB), "float32"),
        ht: T.Tensor((B, Hv, K, NB, VB), "float32"),
        h: T.Tensor((MB, VB, K), dtype),
        u: T.Tensor((MB, VB, C), dtype),
    ):
        with T.Kernel(NB, Hv, B, threads=128) as (vb, hv, bb):
            ks = T.alloc_shared((C, K), dtype)
            vs = T.alloc_shared((C, VB), dtype)
            Ns = T.alloc_shared((C, C), dtype)
            gs = T.alloc_shared((GATES, C), "float32")
            hs = T.alloc_shared((VB, K), dtype)
            us = T.alloc_shared((VB, C), dtype)
            st = T.alloc_fragment((VB, K), "float32")
            sb = T.alloc_fragment((VB, K), dtype)
            x = T.alloc_fragment((VB, C), "float32")
            xb = T.alloc_fragment((VB, C), dtype)
            bv = T.alloc_fragment((VB, C), "float32")
            hk = T.alloc_var("int32")
            hk = T.truncdiv(hv, T.truncdiv(Hv, Hk))
            chunks = T.ceildiv(S, C)
            T.annotate_layout({vs: make_swizzled_layout(vs)})  # it is read down its columns

            for i, j in T.Parallel(VB, K):
                st[i, j] = h0[bb, hv, j, vb, i]
            for n in T.Pipelined(chunks, num_stages=stages):
                T.copy(k[bb, n * C : (n + 1) * C, hk, 0:K], ks)
                T.copy(v[bb, n * C : (n + 1) * C, hv, vb, 0:VB], vs)
                T.copy(N[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ns)
                T.copy(gates[(bb * chunks + n) * Hv + hv, 0:GATES, 0:C], gs)
                T.copy(st, sb)
                T.tma_store_wait(1)  # the previous chunk's state has been read from hs, its u may still be under way
                T.copy(st, hs)
                for i, j in T.Parallel(VB, C):
                    bv[i, j] = gs[BETA, j] * vs[j, i]
                T.gemm(sb, ks, x, transpose_B=True, clear_accum=True)
                T.tma_copy(hs, h[((bb * chunks + n) * Hv + hv) * NB + vb, 0:VB, 0:K])
                for i, j in T.Parallel(VB, C):
                    x[i, j] = bv[i, j] - gs[BETA, j] * gs[DECAY, j] * x[i, j]
                T.copy(x, xb)
                T.gemm(xb, Ns, x, transpose_B=True)  # x becomes u; the unit diagonal is x itself, unrounded
                T.tma_store_wait(1)
                T.copy(x, us)
                for i, j in T.Parallel(VB, C):
                    x[i, j] *= gs[REST, j]
                T.copy(x, xb)
                for i, j in T.Parallel(VB, K):
                    st[i, j] *= gs[DECAY, C - 1]
                T.gemm(xb, ks, st)
                T.tma_copy(us, u[((bb * chunks + n) * Hv + hv) * NB + vb, 0:VB, 0:C])
            T.tma_store_wait(0)
            for i, j in T.Parallel(VB, K):
                ht[bb, hv, j, vb, i] = st[i, j]

    return gdn_states


def output(K: int, dtype: str, out_dtype: str, stages: int = 2):
    """One block per (sequence, chunk, k head); one flat loop over the blocks of 64 columns of V of the group."""
    B, S, Hk, HB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "HB", "M", "MB"))

    @T.prim_func
    def gdn_output(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
        h: T.Tensor((MB, VB, K), dtype),
        u: T.Tensor((MB, VB, C), dtype),
        o: T.Tensor((B, S, HB, VB), out_dtype),
        R: T.int32,
        NB: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(S, C), Hk, B, threads=128) as (bc, hk, bb):
            # Two blocks an SM. The compiler's own register budget (240 + 24) counts on one, and would wait for ever.
            T.annotate_min_blocks_per_sm(2)
            T.no_set_max_nreg()
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            hs = T.alloc_shared((VB, K), dtype)
            us = T.alloc_shared((VB, C), dtype)
            Ps = T.alloc_shared((C, C), dtype)
            gs = T.alloc_shared((GATES, C), "float32")
            qk = T.alloc_fragment((C, C), "float32")
            out = T.alloc_fragment((C, VB), "float32")
            t0 = bc * C
            first = ((bb * T.ceildiv(S, C) + bc) * Hk + hk) * R

            T.copy(q[bb, t0 : t0 + C, hk, 0:K], qs)
            T.copy(k[bb, t0 : t0 + C, hk, 0:K], ks)
            for it in T.Pipelined(R * NB, num_stages=stages):
                T.copy(gates[first + T.truncdiv(it, NB), 0:GATES, 0:C], gs)
                T.copy(h[first * NB + it, 0:VB, 0:K], hs)
                T.copy(u[first * NB + it, 0:VB, 0:C], us)
                if T.truncmod(it, NB) == 0:  # a new head
                    T.gemm(qs, ks, qk, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, C):
                        Ps[i, j] = T.if_then_else(i >= j, scale * qk[i, j] * T.exp(gs[GATE, i] - gs[GATE, j]), 0.0)
                T.gemm(qs, hs, out, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, VB):
                    out[i, j] *= scale * gs[DECAY, i]
                T.gemm(Ps, us, out, transpose_B=True)
                T.copy(out, o[bb, t0 : t0 + C, hk * R * NB + it, 0:VB])

    return gdn_output


def scores(K: int, dtype: str):
    """One block per (sequence, chunk, k head): P = scale q.k^T with the decay, for the reverse scan."""
    B, S, Hk, M = (T.dynamic(n) for n in ("B", "S", "Hk", "M"))

    @T.prim_func
    def gdn_scores(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
        P: T.Tensor((M, C, C), dtype),
        R: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(S, C), Hk, B, threads=128) as (bc, hk, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            Ps = T.alloc_shared((C, C), dtype)
            gs = T.alloc_shared((C,), "float32")
            qk = T.alloc_fragment((C, C), "float32")
            p = T.alloc_fragment((C, C), "float32")
            t0 = bc * C
            first = T.alloc_var("int32")
            first = ((bb * T.ceildiv(S, C) + bc) * Hk + hk) * R

            T.copy(q[bb, t0 : t0 + C, hk, 0:K], qs)
            T.copy(k[bb, t0 : t0 + C, hk, 0:K], ks)
            T.gemm(qs, ks, qk, transpose_B=True, clear_accum=True)
            for head in T.serial(R):
                T.copy(gates[first + head, GATE, 0:C], gs)
                for i, j in T.Parallel(C, C):
                    p[i, j] = T.if_then_else(i >= j, scale * qk[i, j] * T.exp(gs[i] - gs[j]), 0.0)
                T.copy(p, Ps)
                T.copy(Ps, P[first + head, 0:C, 0:C])

    return gdn_scores
