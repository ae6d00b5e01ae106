"""Kernels 4 and 5: the scan of the state's gradient, last chunk first, and the gradients that need no scan.

Imported only when a kernel is built: it needs TileLang.
"""

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .tiles import BETA, DECAY, GATE, GATES, LEAD, REST, VB, C


def reverse(K: int, dtype: str, stages: int = 2):
    """One block per (sequence, v head, 64 columns of V). Writes dv, dh0, and per chunk dS (after it) and dx.

    Transposed like the forward scan, and for the same reason. It works on dS / scale, and within a chunk on that
    over e^G of the first token: q^T is then multiplied by e^(G - G_first) do, which is do, unrounded, where the gate is
    0 and in the first token, which outweighs the others under strong decay. A scale of zero is taken as 1: ``norm``,
    with ``inverse`` for 1 / norm; ``ratio`` is scale / norm.
    """
    B, S, Hk, Hv, NB, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "Hv", "NB", "M", "MB"))

    @T.prim_func
    def gdn_reverse(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        do: T.Tensor((B, S, Hv, NB, VB), dtype),
        N: T.Tensor((M, C, C), dtype),
        P: T.Tensor((M, C, C), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
        dht: T.Tensor((B, Hv, K, NB, VB), "float32"),
        dv: T.Tensor((B, S, Hv, NB, VB), dtype),
        dh0: T.Tensor((B, Hv, K, NB, VB), "float32"),
        dh: T.Tensor((MB, VB, K), dtype),
        dx: T.Tensor((MB, VB, C), dtype),
        norm: T.float32,
        inverse: T.float32,
        ratio: T.float32,
    ):
        with T.Kernel(NB, Hv, B, threads=128) as (vb, hv, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            os = T.alloc_shared((C, VB), dtype)
            Ns = T.alloc_shared((C, C), dtype)
            Ps = T.alloc_shared((C, C), dtype)
            gs = T.alloc_shared((GATES, C), "float32")
            ds = T.alloc_shared((VB, K), dtype)
            xs = T.alloc_shared((VB, C), dtype)
            eo = T.alloc_shared((C, VB), dtype)
            ys = T.alloc_shared((C, VB), dtype)
            st = T.alloc_fragment((VB, K), "float32")
            sb = T.alloc_fragment((VB, K), dtype)
            x = T.alloc_fragment((VB, C), "float32")
            xb = T.alloc_fragment((VB, C), dtype)
            hk = T.alloc_var("int32")
            hk = T.truncdiv(hv, T.truncdiv(Hv, Hk))
            chunks = T.ceildiv(S, C)
            T.annotate_layout({ys: make_swizzled_layout(ys)})  # it is written down its columns

            for i, j in T.Parallel(VB, K):
                st[i, j] = inverse * dht[bb, hv, j, vb, i]
            for step in T.Pipelined(chunks, num_stages=stages):
                n = chunks - 1 - step
                T.copy(q[bb, n * C : (n + 1) * C, hk, 0:K], qs)
                T.copy(k[bb, n * C : (n + 1) * C, hk, 0:K], ks)
                T.copy(do[bb, n * C : (n + 1) * C, hv, vb, 0:VB], os)
                T.copy(N[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ns)
                T.copy(P[(bb * chunks + n) * Hv + hv, 0:C, 0:C], Ps)
                T.copy(gates[(bb * chunks + n) * Hv + hv, 0:GATES, 0:C], gs)
                T.copy(st, sb)
                T.tma_store_wait(
                    2
                )  # each buffer is waited for where it is next written: dh, dx, dv leave in this order
                T.copy(st, ds)
                for i, j in T.Parallel(C, VB):
                    eo[i, j] = ratio * gs[LEAD, i] * os[i, j]
                T.gemm(sb, ks, x, transpose_B=True, clear_accum=True)
                T.tma_copy(ds, dh[((bb * chunks + n) * Hv + hv) * NB + vb, 0:VB, 0:K])
                for i, j in T.Parallel(VB, C):
                    x[i, j] *= norm * gs[REST, j]
                T.gemm(os, Ps, x, transpose_A=True)  # du
                T.copy(x, xb)
                T.gemm(xb, Ns, x)  # dx
                T.tma_store_wait(1)
                T.copy(x, xs)
                for i, j in T.Parallel(VB, C):
                    x[i, j] *= gs[BETA, j]
                for i, j in T.Parallel(VB, C):
                    ys[j, i] = x[i, j]
                for i, j in T.Parallel(VB, C):
                    x[i, j] *= -inverse * gs[LEAD, j]
                T.copy(x, xb)
                for i, j in T.Parallel(VB, K):
                    st[i, j] *= gs[LEAD, C - 1]
                T.gemm(eo, qs, st, transpose_A=True)
                T.gemm(xb, ks, st)
                for i, j in T.Parallel(VB, K):
                    st[i, j] *= gs[DECAY, 0]
                T.tma_copy(xs, dx[((bb * chunks + n) * Hv + hv) * NB + vb, 0:VB, 0:C])
                T.tma_copy(ys, dv[bb, n * C : (n + 1) * C, hv, vb, 0:VB])
            T.tma_store_wait(0)
            for i, j in T.Parallel(VB, K):
                dh0[bb, hv, j, vb, i] = norm * st[i, j]

    return gdn_reverse


def gradients(K: int, dtype: str, grad_dtype: str, stages: int = 2):
    """One block per (sequence, chunk, k head): dq and dk summed over the group in fp32, dg and dbeta.

    One flat loop over the blocks of 64 columns of V of all v heads of the group, so that the tiles of the next block
    load while one is worked on; the ``[C, C]`` products are finished with the last block of a head.
    """
    B, S, Hk, HB, R, M, MB = (T.dynamic(n) for n in ("B", "S", "Hk", "HB", "R", "M", "MB"))

    @T.prim_func
    def gdn_gradients(
        q: T.Tensor((B, S, Hk, K), dtype),
        k: T.Tensor((B, S, Hk, K), dtype),
        v: T.Tensor((B, S, HB, VB), dtype),
        do: T.Tensor((B, S, HB, VB), dtype),
        gates: T.Tensor((M, GATES, C), "float32"),
        h: T.Tensor((MB, VB, K), dtype),
        u: T.Tensor((MB, VB, C), dtype),
        dh: T.Tensor((MB, VB, K), dtype),
        dx: T.Tensor((MB, VB, C), dtype),
        dq: T.Tensor((B, S, Hk, K), grad_dtype),
        dk: T.Tensor((B, S, Hk, K), grad_dtype),
        dg: T.Tensor((B, S, Hk, R), "float32"),
        dbeta: T.Tensor((B, S, Hk, R), "float32"),
        NB: T.int32,
        scale: T.float32,
        norm: T.float32,
    ):
        with T.Kernel(T.ceildiv(S, C), Hk, B, threads=256) as (bc, hk, bb):
            qs = T.alloc_shared((C, K), dtype)
            ks = T.alloc_shared((C, K), dtype)
            vs = T.alloc_shared((C, VB), dtype)
            os = T.alloc_shared((C, VB), dtype)
            hs = T.alloc_shared((VB, K), dtype)
            us = T.alloc_shared((VB, C), dtype)
            ds = T.alloc_shared((VB, K), dtype)
            xs = T.alloc_shared((VB, C), dtype)
            Ps = T.alloc_shared((C, C), dtype)
            Ms = T.alloc_shared((C, C), dtype)
            gs = T.alloc_shared((GATES, C), "float32")
            # per token: reads of the state, writes to it, k.(S dx), rows and columns of W, dbeta's rows, dx.v
            rd = T.alloc_shared((C, 2), "float32")
            wr = T.alloc_shared((C, 2), "float32")
            kx = T.alloc_shared((C, 2), "float32")
            wrow = T.alloc_shared((C, 2), "float32")
            wcol = T.alloc_shared((4, C), "float32")
            brow = T.alloc_shared((C, 2), "float32")
            xv = T.alloc_shared((C, 2), "float32")
            later = T.alloc_shared((C,), "float32")
            carry = T.alloc_shared((VB,), "float32")
            dqa = T.alloc_fragment((C, K), "float32")
            dka = T.alloc_fragment((C, K), "float32")
            t = T.alloc_fragment((C, K), "float32")
            c = T.alloc_fragment((C, C), "float32")  # dx.v^T, q.k^T, k.k^T
            a = T.alloc_fragment((C, C), "float32")  # do.u^T, then its part of dg
            b = T.alloc_fragment((C, C), "float32")  # dx.u^T, then its part of dbeta
            hd = T.alloc_fragment((VB, K), "float32")
            tsum = T.alloc_fragment((C, 2), "float32")
            rd_f = T.alloc_fragment((C, 2), "float32")
            wr_f = T.alloc_fragment((C, 2), "float32")
            kx_f = T.alloc_fragment((C, 2), "float32")
            xv_f = T.alloc_fragment((C, 2), "float32")
            ksum = T.alloc_fragment((VB,), "float32")
            carry_f = T.alloc_fragment((VB,), "float32")
            rowsum = T.alloc_fragment((C, 2), "float32")
            colsum = T.alloc_fragment((4, C), "float32")
            # The two warpgroups hold the two halves of every row and their warps 16 rows each: sums stay within a warp.
            thalf = T.alloc_fragment((C, 2, K // 2), "float32")
            chalf = T.alloc_fragment((C, 2, C // 2), "float32")
            rows16 = T.alloc_fragment((4, 16, C), "float32")
            acc = T.alloc_local((1,), "float32")
            t0 = bc * C
            first = ((bb * T.ceildiv(S, C) + bc) * Hk + hk) * R
            tx = T.get_thread_binding()
            T.copy(q[bb, t0 : t0 + C, hk, 0:K], qs)
            T.copy(k[bb, t0 : t0 + C, hk, 0:K], ks)
            T.clear(dqa)
            T.clear(dka)
            for it in T.Pipelined(R * NB, num_stages=stages):
                T.copy(gates[first + T.truncdiv(it, NB), 0:GATES, 0:C], gs)
                T.copy(v[bb, t0 : t0 + C, hk * R * NB + it, 0:VB], vs)
                T.copy(do[bb, t0 : t0 + C, hk * R * NB + it, 0:VB], os)
                T.copy(h[first * NB + it, 0:VB, 0:K], hs)
                T.copy(u[first * NB + it, 0:VB, 0:C], us)
                T.copy(dh[first * NB + it, 0:VB, 0:K], ds)
                T.copy(dx[first * NB + it, 0:VB, 0:C], xs)
                if T.truncmod(it, NB) == 0:
                    T.clear(rd_f)
                    T.clear(wr_f)
                    T.clear(kx_f)
                    T.clear(xv_f)
                    T.clear(carry_f)
                    T.clear(a)
                    T.clear(b)

                T.gemm(os, us, a)
                T.gemm(xs, us, b, transpose_A=True)

                T.gemm(os, hs, t, clear_accum=True)
                for i, j in T.Parallel(C, K):
                    t[i, j] *= scale * gs[DECAY, i]
                for i, j in T.Parallel(C, K):
                    dqa[i, j] += t[i, j]
                for i, half, j in T.Parallel(C, 2, K // 2):
                    thalf[i, half, j] = t[i, half * (K // 2) + j] * qs[i, half * (K // 2) + j]
                T.reduce_sum(thalf, tsum, dim=2, clear=True)
                for i, half in T.Parallel(C, 2):
                    rd_f[i, half] += tsum[i, half]

                T.gemm(xs, hs, t, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(C, K):
                    t[i, j] *= gs[DECAY, i]
                for i, j in T.Parallel(C, K):
                    dka[i, j] -= gs[BETA, i] * t[i, j]
                for i, half, j in T.Parallel(C, 2, K // 2):
                    thalf[i, half, j] = t[i, half * (K // 2) + j] * ks[i, half * (K // 2) + j]
                T.reduce_sum(thalf, tsum, dim=2, clear=True)
                for i, half in T.Parallel(C, 2):
                    kx_f[i, half] += tsum[i, half]

                T.gemm(us, ds, t, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(C, K):
                    t[i, j] *= norm * gs[REST, i]
                for i, j in T.Parallel(C, K):
                    dka[i, j] += t[i, j]
                for i, half, j in T.Parallel(C, 2, K // 2):
                    thalf[i, half, j] = t[i, half * (K // 2) + j] * ks[i, half * (K // 2) + j]
                T.reduce_sum(thalf, tsum, dim=2, clear=True)
                for i, half in T.Parallel(C, 2):
                    wr_f[i, half] += tsum[i, half]

                T.gemm(xs, vs, c, transpose_A=True, transpose_B=True, clear_accum=True)
                for i, half, j in T.Parallel(C, 2, C // 2):  # only the diagonal is wanted: dx_i.v_i
                    chalf[i, half, j] = T.if_then_else(i == half * (C // 2) + j, c[i, half * (C // 2) + j], 0.0)
                T.reduce_sum(chalf, rowsum, dim=2, clear=True)
                for i, half in T.Parallel(C, 2):
                    xv_f[i, half] += rowsum[i, half]
                for i, j in T.Parallel(VB, K):
                    hd[i, j] = T.cast(hs[i, j], "float32") * T.cast(ds[i, j], "float32")
                T.reduce_sum(hd, ksum, dim=1, clear=True)
                for i in T.Parallel(VB):
                    carry_f[i] += ksum[i]

                if T.truncmod(it, NB) == NB - 1:
                    # For dg, below the diagonal only: the diagonal does not depend on the gate, and under strong decay
                    # it is 1e9 times the rest.
                    for i, j in T.Parallel(C, C):
                        Ps[i, j] = T.if_then_else(i >= j, scale * a[i, j] * T.exp(gs[GATE, i] - gs[GATE, j]), 0.0)
                    for i, j in T.Parallel(C, C):
                        b[i, j] *= T.if_then_else(i > j, T.exp(gs[GATE, i] - gs[GATE, j]), 0.0)
                    for i, j in T.Parallel(C, C):
                        Ms[i, j] = -gs[BETA, i] * b[i, j]
                    T.gemm(Ps, ks, dqa)
                    T.gemm(Ps, qs, dka, transpose_A=True)
                    T.gemm(Ms, ks, dka)
                    T.gemm(Ms, ks, dka, transpose_A=True)
                    T.gemm(qs, ks, c, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, C):
                        a[i, j] *= T.if_then_else(i > j, scale * c[i, j] * T.exp(gs[GATE, i] - gs[GATE, j]), 0.0)
                    T.gemm(ks, ks, c, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(C, C):
                        b[i, j] *= c[i, j]
                    for i, j in T.Parallel(C, C):
                        a[i, j] -= gs[BETA, i] * b[i, j]
                    for i, half, j in T.Parallel(C, 2, C // 2):
                        chalf[i, half, j] = b[i, half * (C // 2) + j]
                    T.reduce_sum(chalf, rowsum, dim=2, clear=True)
                    T.copy(rowsum, brow)
                    for i, half, j in T.Parallel(C, 2, C // 2):
                        chalf[i, half, j] = a[i, half * (C // 2) + j]
                    T.reduce_sum(chalf, rowsum, dim=2, clear=True)
                    T.copy(rowsum, wrow)
                    for i, r, j in T.Parallel(4, 16, C):
                        rows16[i, r, j] = a[i * 16 + r, j]
                    T.reduce_sum(rows16, colsum, dim=1, clear=True)
                    T.copy(colsum, wcol)
                    T.copy(rd_f, rd)
                    T.copy(wr_f, wr)
                    T.copy(kx_f, kx)
                    T.copy(xv_f, xv)
                    T.copy(carry_f, carry)
                    # what crosses the boundary before token tx: reads from it on, writes before it, the carried state
                    for i in T.Parallel(C):
                        later[i] = (
                            rd[i, 0]
                            + rd[i, 1]
                            - gs[BETA, i] * (kx[i, 0] + kx[i, 1])
                            + (wrow[i, 0] + wrow[i, 1] - (wcol[0, i] + wcol[1, i] + wcol[2, i] + wcol[3, i]))
                        )
                    if tx < C and t0 + tx < S:
                        acc[0] = 0.0
                        for i in T.unroll(VB):
                            acc[0] += carry[i]
                        acc[0] *= norm * gs[DECAY, C - 1]
                        for i in T.unroll(C):
                            acc[0] += T.if_then_else(i < tx, wr[i, 0] + wr[i, 1], later[i])
                        dg[bb, t0 + tx, hk, T.truncdiv(it, NB)] = acc[0]
                        dbeta[bb, t0 + tx, hk, T.truncdiv(it, NB)] = (
                            xv[tx, 0] + xv[tx, 1] - (kx[tx, 0] + kx[tx, 1]) - (brow[tx, 0] + brow[tx, 1])
                        )

            T.copy(dqa, dq[bb, t0 : t0 + C, hk, 0:K])
            T.copy(dka, dk[bb, t0 : t0 + C, hk, 0:K])

    return gdn_gradients
