"""Kernels 2 and 3: the scan over chunks, forward, with the output or with what the backward needs of it.

Imported only when a kernel is built: it needs TileLang.
"""

import tilelang.language as T

from .tiles import VB, C


def scan(K: int, dtype: str, out_dtype: str, stages: int = 2):
    """One block per (sequence, v head, 64 columns of V); the state stays in registers in fp32. Writes o and the final state."""
    B, S, Hk, Hv, NB, M = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "NB", "M"))

    @T.prim_func
    def gdn_scan(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        v: T.Tensor((B, S, Hv, NB, VB), dtype),
        N: T.Tensor((M, C, C), dtype),
        G: T.Tensor((M, C), "float32"),
        bt: T.Tensor((M, C), "float32"),
        h0: T.Tensor((B, Hv, K, NB, VB), "float32"),
        o: T.Tensor((B, S, Hv, NB, VB), out_dtype),
        ht: T.Tensor((B, Hv, K, NB, VB), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(NB, Hv, B, threads=128) as (vb, hv, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            vs = T.alloc_shared((C, VB), dtype)
            Ns = T.alloc_shared((C, C), dtype)
            Gs = T.alloc_shared((C,), "float32")
            bs = T.alloc_shared((C,), "float32")
            es = T.alloc_shared((C,), "float32")
            rs = T.alloc_shared((C,), "float32")
            Ps = T.alloc_shared((C, C), dtype)
            Ss = T.alloc_shared((K, VB), dtype)
            xs = T.alloc_shared((C, VB), dtype)
            us = T.alloc_shared((C, VB), dtype)
            S_ = T.alloc_fragment((K, VB), "float32")
            p = T.alloc_fragment((C, C), "float32")
            x = T.alloc_fragment((C, VB), "float32")
            out = T.alloc_fragment((C, VB), "float32")
            hk = T.alloc_var("int32")
            hk = T.truncdiv(hv, T.truncdiv(Hv, Hk))
            chunks = T.ceildiv(S, C)

            T.copy(h0[bb, hv, 0:K, vb, 0:VB], S_)
            for n in T.Pipelined(chunks, num_stages=stages):
                T.copy(q[bb, n * C : (n + 1) * C, hk, 0:K], qs)
                T.copy(k[bb, n * C : (n + 1) * C, hk, 0:K], ks)
                T.copy(v[bb, n * C : (n + 1) * C, hv, vb, 0:VB], vs)
                T.copy(N[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ns)
                T.copy(G[(bb * chunks + n) * Hv + hv, 0:C], Gs)
                T.copy(bt[(bb * chunks + n) * Hv + hv, 0:C], bs)
                for i in T.Parallel(C):
                    es[i] = T.exp(Gs[i])
                    rs[i] = T.exp(Gs[C - 1] - Gs[i])
                T.copy(S_, Ss)
                T.gemm(qs, ks, p, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    Ps[i, j] = T.if_then_else(i >= j, scale * p[i, j] * T.exp(Gs[i] - Gs[j]), 0.0)
                T.gemm(ks, Ss, x, clear_accum=True)
                for i, j in T.Parallel(C, VB):
                    x[i, j] = bs[i] * (vs[i, j] - es[i] * x[i, j])
                T.copy(x, xs)
                T.gemm(qs, Ss, out, clear_accum=True)
                T.gemm(Ns, xs, x)  # x becomes u; the unit diagonal is x itself, unrounded
                T.copy(x, us)
                for i, j in T.Parallel(C, VB):
                    out[i, j] *= scale * es[i]
                T.gemm(Ps, us, out)
                T.copy(out, o[bb, n * C : (n + 1) * C, hv, vb, 0:VB])
                for i, j in T.Parallel(C, VB):
                    us[i, j] = rs[i] * x[i, j]
                for i, j in T.Parallel(K, VB):
                    S_[i, j] *= es[C - 1]
                T.gemm(ks, us, S_, transpose_A=True)
            T.copy(S_, ht[bb, hv, 0:K, vb, 0:VB])

    return gdn_scan


def states(K: int, dtype: str, stages: int = 2):
    """The same scan for the backward: writes the state before each chunk and its u, no o."""
    B, S, Hk, Hv, NB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "NB", "M", "MB"))

    @T.prim_func
    def gdn_states(
        k: T.Tensor((B, S, Hk, K), dtype),
        v: T.Tensor((B, S, Hv, NB, VB), dtype),
        N: T.Tensor((M, C, C), dtype),
        G: T.Tensor((M, C), "float32"),
        bt: T.Tensor((M, C), "float32"),
        h0: T.Tensor((B, Hv, K, NB, VB), "float32"),
        h: T.Tensor((MB, K, VB), dtype),
        u: T.Tensor((MB, C, VB), dtype),
    ):
        with T.Kernel(NB, Hv, B, threads=128) as (vb, hv, bb):
            ks = T.alloc_shared((C, K), dtype)
            vs = T.alloc_shared((C, VB), dtype)
            Ns = T.alloc_shared((C, C), dtype)
            Gs = T.alloc_shared((C,), "float32")
            bs = T.alloc_shared((C,), "float32")
            es = T.alloc_shared((C,), "float32")
            rs = T.alloc_shared((C,), "float32")
            Ss = T.alloc_shared((K, VB), dtype)
            xs = T.alloc_shared((C, VB), dtype)
            us = T.alloc_shared((C, VB), dtype)
            S_ = T.alloc_fragment((K, VB), "float32")
            x = T.alloc_fragment((C, VB), "float32")
            hk = T.alloc_var("int32")
            hk = T.truncdiv(hv, T.truncdiv(Hv, Hk))
            chunks = T.ceildiv(S, C)

            T.copy(h0[bb, hv, 0:K, vb, 0:VB], S_)
            for n in T.Pipelined(chunks, num_stages=stages):
                T.copy(k[bb, n * C : (n + 1) * C, hk, 0:K], ks)
                T.copy(v[bb, n * C : (n + 1) * C, hv, vb, 0:VB], vs)
                T.copy(N[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ns)
                T.copy(G[(bb * chunks + n) * Hv + hv, 0:C], Gs)
                T.copy(bt[(bb * chunks + n) * Hv + hv, 0:C], bs)
                for i in T.Parallel(C):
                    es[i] = T.exp(Gs[i])
                    rs[i] = T.exp(Gs[C - 1] - Gs[i])
                T.copy(S_, Ss)
                T.copy(Ss, h[((bb * chunks + n) * Hv + hv) * NB + vb, 0:K, 0:VB])
                T.gemm(ks, Ss, x, clear_accum=True)
                for i, j in T.Parallel(C, VB):
                    x[i, j] = bs[i] * (vs[i, j] - es[i] * x[i, j])
                T.copy(x, xs)
                T.gemm(Ns, xs, x)
                T.copy(x, xs)
                T.copy(xs, u[((bb * chunks + n) * Hv + hv) * NB + vb, 0:C, 0:VB])
                for i, j in T.Parallel(C, VB):
                    us[i, j] = rs[i] * x[i, j]
                for i, j in T.Parallel(K, VB):
                    S_[i, j] *= es[C - 1]
                T.gemm(ks, us, S_, transpose_A=True)

    return gdn_states
