"""Kernels 4 and 5: the scan of the state's gradient, last chunk first, and the gradients that need no scan.

Imported only when a kernel is built: it needs TileLang.
"""

import tilelang.language as T

from .tiles import VB, C


def reverse(K: int, dtype: str, stages: int = 2):
    """One block per (sequence, v head, 64 columns of V). Writes dv, dh0, and per chunk dS (after it) and dx."""
    B, S, Hk, Hv, NB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "NB", "M", "MB"))

    @T.prim_func
    def gdn_reverse(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        do: T.Tensor((B, S, Hv, NB, VB), dtype),
        N: T.Tensor((M, C, C), dtype),
        G: T.Tensor((M, C), "float32"),
        bt: T.Tensor((M, C), "float32"),
        dht: T.Tensor((B, Hv, K, NB, VB), "float32"),
        dv: T.Tensor((B, S, Hv, NB, VB), dtype),
        dh0: T.Tensor((B, Hv, K, NB, VB), "float32"),
        dh: T.Tensor((MB, K, VB), dtype),
        dx: T.Tensor((MB, C, VB), dtype),
        scale: T.float32,
    ):
        with T.Kernel(NB, Hv, B, threads=128) as (vb, hv, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            os = T.alloc_shared((C, VB), dtype)
            Ns = T.alloc_shared((C, C), dtype)
            Gs = T.alloc_shared((C,), "float32")
            bs = T.alloc_shared((C,), "float32")
            es = T.alloc_shared((C,), "float32")
            rs = T.alloc_shared((C,), "float32")
            Ps = T.alloc_shared((C, C), dtype)
            Ds = T.alloc_shared((K, VB), dtype)
            xs = T.alloc_shared((C, VB), dtype)
            ys = T.alloc_shared((C, VB), dtype)
            es_o = T.alloc_shared((C, VB), dtype)
            D_ = T.alloc_fragment((K, VB), "float32")
            p = T.alloc_fragment((C, C), "float32")
            x = T.alloc_fragment((C, VB), "float32")
            hk = T.alloc_var("int32")
            hk = T.truncdiv(hv, T.truncdiv(Hv, Hk))
            chunks = T.ceildiv(S, C)

            T.copy(dht[bb, hv, 0:K, vb, 0:VB], D_)
            for step in T.Pipelined(chunks, num_stages=stages):
                n = chunks - 1 - step
                T.copy(q[bb, n * C : (n + 1) * C, hk, 0:K], qs)
                T.copy(k[bb, n * C : (n + 1) * C, hk, 0:K], ks)
                T.copy(do[bb, n * C : (n + 1) * C, hv, vb, 0:VB], os)
                T.copy(N[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ns)
                T.copy(G[(bb * chunks + n) * Hv + hv, 0:C], Gs)
                T.copy(bt[(bb * chunks + n) * Hv + hv, 0:C], bs)
                for i in T.Parallel(C):
                    es[i] = T.exp(Gs[i])
                    rs[i] = T.exp(Gs[C - 1] - Gs[i])
                T.copy(D_, Ds)
                T.copy(Ds, dh[((bb * chunks + n) * Hv + hv) * NB + vb, 0:K, 0:VB])
                T.gemm(qs, ks, p, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    Ps[i, j] = T.if_then_else(i >= j, scale * p[i, j] * T.exp(Gs[i] - Gs[j]), 0.0)
                T.gemm(ks, Ds, x, clear_accum=True)
                for i, j in T.Parallel(C, VB):
                    x[i, j] *= rs[i]
                T.gemm(Ps, os, x, transpose_A=True)  # du
                T.copy(x, xs)
                T.gemm(Ns, xs, x, transpose_A=True)  # dx
                for i, j in T.Parallel(C, VB):
                    es_o[i, j] = scale * es[i] * os[i, j]
                T.copy(x, xs)
                T.copy(xs, dx[((bb * chunks + n) * Hv + hv) * NB + vb, 0:C, 0:VB])
                for i, j in T.Parallel(C, VB):
                    x[i, j] *= bs[i]
                T.copy(x, dv[bb, n * C : (n + 1) * C, hv, vb, 0:VB])
                for i, j in T.Parallel(C, VB):
                    ys[i, j] = -es[i] * x[i, j]
                for i, j in T.Parallel(K, VB):
                    D_[i, j] *= es[C - 1]
                T.gemm(qs, es_o, D_, transpose_A=True)
                T.gemm(ks, ys, D_, transpose_A=True)
            T.copy(D_, dh0[bb, hv, 0:K, vb, 0:VB])

    return gdn_reverse


def gradients(K: int, dtype: str, grad_dtype: str, stages: int = 1):
    """One block per (sequence, chunk, k head): dq and dk summed over the group in fp32, dg and dbeta.

    The loop runs over the v heads of the group and, within one, over blocks of 64 columns of V.
    """
    B, S, Hk, Hv, R, NB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "R", "NB", "M", "MB"))

    @T.prim_func
    def gdn_gradients(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        v: T.Tensor((B, S, Hv, NB, VB), dtype),
        do: T.Tensor((B, S, Hv, NB, VB), dtype),
        G: T.Tensor((M, C), "float32"),
        bt: T.Tensor((M, C), "float32"),
        h: T.Tensor((MB, K, VB), dtype),
        u: T.Tensor((MB, C, VB), dtype),
        dh: T.Tensor((MB, K, VB), dtype),
        dx: T.Tensor((MB, C, VB), dtype),
        dq: T.Tensor((B, S, Hk, K), grad_dtype),
        dk: T.Tensor((B, S, Hk, K), grad_dtype),
        dg: T.Tensor((B, S, Hk, R), "float32"),
        dbeta: T.Tensor((B, S, Hk, R), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(S, C), Hk, B, threads=256) as (bc, hk, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            vs = T.alloc_shared((C, VB), dtype)
            os = T.alloc_shared((C, VB), dtype)
            hs = T.alloc_shared((K, VB), dtype)
            us = T.alloc_shared((C, VB), dtype)
            ds = T.alloc_shared((K, VB), dtype)
            xs = T.alloc_shared((C, VB), dtype)
            Ps = T.alloc_shared((C, C), dtype)
            Gs = T.alloc_shared((C,), "float32")
            bs = T.alloc_shared((C,), "float32")
            es = T.alloc_shared((C,), "float32")
            rs = T.alloc_shared((C,), "float32")
            # per token: reads of the state, writes to it, k.(S dx), rows and columns of W, dbeta's rows, dx.v
            rd = T.alloc_shared((C,), "float32")
            wr = T.alloc_shared((C,), "float32")
            kx = T.alloc_shared((C,), "float32")
            wrow = T.alloc_shared((C,), "float32")
            wcol = T.alloc_shared((C,), "float32")
            brow = T.alloc_shared((C,), "float32")
            xv = T.alloc_shared((C,), "float32")
            carry = T.alloc_shared((K,), "float32")
            dqa = T.alloc_fragment((C, K), "float32")
            dka = T.alloc_fragment((C, K), "float32")
            t = T.alloc_fragment((C, K), "float32")
            kk = T.alloc_fragment((C, C), "float32")
            qk = T.alloc_fragment((C, C), "float32")
            a = T.alloc_fragment((C, C), "float32")  # do.u^T, then its part of dg
            b = T.alloc_fragment((C, C), "float32")  # dx.u^T, then its part of dbeta
            sp = T.alloc_fragment((C, C), "float32")
            sm = T.alloc_fragment((C, C), "float32")
            w = T.alloc_fragment((C, VB), "float32")
            hd = T.alloc_fragment((K, VB), "float32")
            tsum = T.alloc_fragment((C,), "float32")
            rd_f = T.alloc_fragment((C,), "float32")
            wr_f = T.alloc_fragment((C,), "float32")
            kx_f = T.alloc_fragment((C,), "float32")
            wsum = T.alloc_fragment((C,), "float32")
            xv_f = T.alloc_fragment((C,), "float32")
            ksum = T.alloc_fragment((K,), "float32")
            carry_f = T.alloc_fragment((K,), "float32")
            rowsum = T.alloc_fragment((C,), "float32")
            colsum = T.alloc_fragment((C,), "float32")
            acc = T.alloc_local((1,), "float32")
            t0 = bc * C
            tx = T.get_thread_binding()
            first = T.alloc_var("int32")
            first = ((bb * T.ceildiv(S, C) + bc) * Hk + hk) * R

            T.copy(q[bb, t0 : t0 + C, hk, 0:K], qs)
            T.copy(k[bb, t0 : t0 + C, hk, 0:K], ks)
            T.gemm(qs, ks, qk, transpose_B=True, clear_accum=True)
            T.gemm(ks, ks, kk, transpose_B=True, clear_accum=True)
            T.clear(dqa)
            T.clear(dka)
            T.clear(sp)
            T.clear(sm)
            for head in T.serial(R):
                T.copy(G[first + head, 0:C], Gs)
                T.copy(bt[first + head, 0:C], bs)
                for i in T.Parallel(C):
                    es[i] = T.exp(Gs[i])
                    rs[i] = T.exp(Gs[C - 1] - Gs[i])
                T.clear(rd_f)
                T.clear(wr_f)
                T.clear(kx_f)
                T.clear(xv_f)
                T.clear(carry_f)
                T.clear(a)
                T.clear(b)
                for vb in T.serial(NB):
                    T.copy(v[bb, t0 : t0 + C, hk * R + head, vb, 0:VB], vs)
                    T.copy(do[bb, t0 : t0 + C, hk * R + head, vb, 0:VB], os)
                    T.copy(h[(first + head) * NB + vb, 0:K, 0:VB], hs)
                    T.copy(u[(first + head) * NB + vb, 0:C, 0:VB], us)
                    T.copy(dh[(first + head) * NB + vb, 0:K, 0:VB], ds)
                    T.copy(dx[(first + head) * NB + vb, 0:C, 0:VB], xs)

                    T.gemm(os, us, a, transpose_B=True)
                    T.gemm(xs, us, b, transpose_B=True)

                    T.gemm(os, hs, t, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= scale * es[i]
                    for i, j in T.Parallel(C, K):
                        dqa[i, j] += t[i, j]
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= qs[i, j]
                    T.reduce_sum(t, tsum, dim=1, clear=True)
                    for i in T.Parallel(C):
                        rd_f[i] += tsum[i]

                    T.gemm(xs, hs, t, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= es[i]
                    for i, j in T.Parallel(C, K):
                        dka[i, j] -= bs[i] * t[i, j]
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= ks[i, j]
                    T.reduce_sum(t, tsum, dim=1, clear=True)
                    for i in T.Parallel(C):
                        kx_f[i] += tsum[i]

                    T.gemm(us, ds, t, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= rs[i]
                    for i, j in T.Parallel(C, K):
                        dka[i, j] += t[i, j]
                    for i, j in T.Parallel(C, K):
                        t[i, j] *= ks[i, j]
                    T.reduce_sum(t, tsum, dim=1, clear=True)
                    for i in T.Parallel(C):
                        wr_f[i] += tsum[i]

                    for i, j in T.Parallel(C, VB):
                        w[i, j] = T.cast(xs[i, j], "float32") * T.cast(vs[i, j], "float32")
                    T.reduce_sum(w, wsum, dim=1, clear=True)
                    for i in T.Parallel(C):
                        xv_f[i] += wsum[i]
                    for i, j in T.Parallel(K, VB):
                        hd[i, j] = T.cast(hs[i, j], "float32") * T.cast(ds[i, j], "float32")
                    T.reduce_sum(hd, ksum, dim=1, clear=True)
                    for i in T.Parallel(K):
                        carry_f[i] += ksum[i]

                # below the diagonal only: it does not depend on the gate and under strong decay is 1e9 times the rest
                for i, j in T.Parallel(C, C):
                    sp[i, j] += T.if_then_else(i == j, scale * a[i, j], 0.0)
                for i, j in T.Parallel(C, C):
                    a[i, j] *= T.if_then_else(i > j, scale * T.exp(Gs[i] - Gs[j]), 0.0)
                for i, j in T.Parallel(C, C):
                    b[i, j] *= T.if_then_else(i > j, T.exp(Gs[i] - Gs[j]), 0.0)
                for i, j in T.Parallel(C, C):
                    sp[i, j] += a[i, j]
                for i, j in T.Parallel(C, C):
                    sm[i, j] -= bs[i] * b[i, j]
                for i, j in T.Parallel(C, C):
                    b[i, j] *= kk[i, j]
                for i, j in T.Parallel(C, C):
                    a[i, j] = a[i, j] * qk[i, j] - bs[i] * b[i, j]
                T.reduce_sum(b, rowsum, dim=1, clear=True)
                T.copy(rowsum, brow)
                T.reduce_sum(a, rowsum, dim=1, clear=True)
                T.copy(rowsum, wrow)
                T.reduce_sum(a, colsum, dim=0, clear=True)
                T.copy(colsum, wcol)
                T.copy(rd_f, rd)
                T.copy(wr_f, wr)
                T.copy(kx_f, kx)
                T.copy(xv_f, xv)
                T.copy(carry_f, carry)
                T.sync_threads()
                # what crosses the boundary before token tx: reads from it on, writes before it, and the carried state
                if tx < C and t0 + tx < S:
                    acc[0] = 0.0
                    for i in T.serial(K):
                        acc[0] += carry[i]
                    acc[0] *= es[C - 1]
                    for i in T.serial(C):
                        acc[0] += T.if_then_else(i < tx, wr[i], rd[i] - bs[i] * kx[i] + (wrow[i] - wcol[i]))
                    dg[bb, t0 + tx, hk, head] = acc[0]
                    dbeta[bb, t0 + tx, hk, head] = xv[tx] - kx[tx] - brow[tx]
                T.sync_threads()

            T.copy(sp, Ps)
            T.gemm(Ps, ks, dqa)
            T.gemm(Ps, qs, dka, transpose_A=True)
            T.copy(sm, Ps)
            T.gemm(Ps, ks, dka)
            T.gemm(Ps, ks, dka, transpose_A=True)
            T.copy(dqa, dq[bb, t0 : t0 + C, hk, 0:K])
            T.copy(dka, dk[bb, t0 : t0 + C, hk, 0:K])

    return gdn_gradients
