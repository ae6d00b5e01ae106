"""Kernel 1: cumulative gates and the inverse of the unit triangular matrix of a chunk.

Imported only when a kernel is built: it needs TileLang.
"""

import tilelang.language as T

from .tiles import BETA, DECAY, GATE, GATES, LEAD, MIN_LOG_DECAY, REST, C

PAD = 4  # L is stored transposed with rows of 68 floats: the wgmma fragment then hits 32 different banks


def solve(K: int, dtype: str):
    """One block per (sequence, chunk, k head); k.k^T is computed once and used by all v heads of the group.

    The inverse is plain forward substitution in fp32: a thread owns a column, two v heads share the 128 threads.
    """
    B, S, Hk, R, M = (T.dynamic(n) for n in ("B", "S", "Hk", "R", "M"))

    @T.prim_func
    def gdn_solve(
        k: T.Tensor((B, S, Hk, K), dtype),
        g: T.Tensor((B, S, Hk, R), "float32"),
        beta: T.Tensor((B, S, Hk, R), "float32"),
        N: T.Tensor((M, C, C), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
    ):
        with T.Kernel(T.ceildiv(S, C), Hk, B, threads=128) as (bc, hk, bb):
            ks = T.alloc_shared((C, K), dtype)
            kk = T.alloc_fragment((C, C), "float32")
            LT = T.alloc_shared((2, C, C + PAD), "float32")
            Ns = T.alloc_shared((2, C, C), dtype)
            gs = T.alloc_shared((2, C), "float32")
            bs = T.alloc_shared((2, C), "float32")
            Gs = T.alloc_shared((2, C), "float32")
            x = T.alloc_local((C,), "float32")
            row = T.alloc_local((4,), "float32")
            acc = T.alloc_local((1,), "float32")
            gate = T.alloc_local((1,), "float32")

            T.annotate_min_blocks_per_sm(4)  # 128 registers: without it loads are hoisted until 255 spill
            tx = T.get_thread_binding()
            half = tx // C
            col = tx % C
            t0 = bc * C
            first = T.alloc_var("int32")  # this chunk's row of N, G and bt for the first head of the group
            first = ((bb * T.ceildiv(S, C) + bc) * Hk + hk) * R

            T.copy(k[bb, t0 : t0 + C, hk, 0:K], ks)
            T.gemm(ks, ks, kk, transpose_B=True, clear_accum=True)

            for pair in T.serial(T.ceildiv(R, 2)):
                gate[0] = 0.0
                bs[half, col] = 0.0
                if t0 + col < S and pair * 2 + half < R:
                    gate[0] = g[bb, t0 + col, hk, pair * 2 + half]
                    bs[half, col] = beta[bb, t0 + col, hk, pair * 2 + half]
                gs[half, col] = T.if_then_else(gate[0] < MIN_LOG_DECAY, MIN_LOG_DECAY, gate[0])
                T.sync_threads()
                acc[0] = 0.0
                for j in T.unroll(C):
                    acc[0] += T.if_then_else(j <= col, gs[half, j], 0.0)
                Gs[half, col] = acc[0]
                T.sync_threads()
                for i, j in T.Parallel(C, C):
                    LT[0, j, i] = T.if_then_else(i > j, bs[0, i] * kk[i, j] * T.exp(Gs[0, i] - Gs[0, j]), 0.0)
                for i, j in T.Parallel(C, C):
                    LT[1, j, i] = T.if_then_else(i > j, bs[1, i] * kk[i, j] * T.exp(Gs[1, i] - Gs[1, j]), 0.0)
                T.sync_threads()
                for i in T.unroll(C):
                    x[i] = T.if_then_else(i == col, 1.0, 0.0)
                # the updates of one step do not depend on each other; rows up to j are zero in LT and stay
                for j in T.unroll(C - 1):
                    for i in T.unroll((j + 1) // 4, C // 4):
                        for w in T.vectorized(4):
                            row[w] = LT[half, j, i * 4 + w]
                        for w in T.unroll(4):
                            x[i * 4 + w] -= row[w] * x[j]
                for i in T.unroll(C):
                    Ns[half, i, col] = T.if_then_else(i == col, 0.0, x[i])
                T.sync_threads()
                T.copy(Ns[0, :, :], N[first + pair * 2, 0:C, 0:C])
                if pair * 2 + 1 < R:
                    T.copy(Ns[1, :, :], N[first + pair * 2 + 1, 0:C, 0:C])
                if pair * 2 + half < R:
                    gates[first + pair * 2 + half, GATE, col] = Gs[half, col]
                    gates[first + pair * 2 + half, BETA, col] = bs[half, col]
                    gates[first + pair * 2 + half, DECAY, col] = T.exp(Gs[half, col])
                    gates[first + pair * 2 + half, REST, col] = T.exp(Gs[half, C - 1] - Gs[half, col])
                    gates[first + pair * 2 + half, LEAD, col] = T.exp(Gs[half, col] - Gs[half, 0])
                T.sync_threads()

    return gdn_solve
