"""Triton kernels for the serial parts of the chunked delta rule (see model.Scan, model.Inverse).

In the scan one program holds BV columns of one head's state and walks all chunks; columns are independent.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # only needed with a GPU
    triton = None

if triton:

    @triton.jit
    def _forward(u, w, k, e, vn, states, heads, chunks: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
        b, col = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
        row, key = tl.arange(0, C), tl.arange(0, DK)
        s = tl.zeros([DK, BV], dtype=tl.float32)
        for i in range(chunks):
            at = (i * heads + b).to(tl.int64)
            tl.store(states + at * DK * DV + key[:, None] * DV + col[None, :], s)
            wi = tl.load(w + at * C * DK + row[:, None] * DK + key[None, :])
            ui = tl.load(u + at * C * DV + row[:, None] * DV + col[None, :])
            v = ui - tl.dot(wi, s)
            tl.store(vn + at * C * DV + row[:, None] * DV + col[None, :], v)
            kt = tl.load(k + at * C * DK + row[None, :] * DK + key[:, None])
            s = s * tl.load(e + at) + tl.dot(kt, v)

    @triton.jit
    def _backward(dvn, dstates, w, k, e, out, ahead, heads, chunks: tl.constexpr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
        b, col = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
        row, key = tl.arange(0, C), tl.arange(0, DK)
        d = tl.zeros([DK, BV], dtype=tl.float32)
        for j in range(chunks):
            at = ((chunks - 1 - j) * heads + b).to(tl.int64)
            tl.store(ahead + at * DK * DV + key[:, None] * DV + col[None, :], d)
            ki = tl.load(k + at * C * DK + row[:, None] * DK + key[None, :])
            v = tl.load(dvn + at * C * DV + row[:, None] * DV + col[None, :]) + tl.dot(ki, d)
            tl.store(out + at * C * DV + row[:, None] * DV + col[None, :], v)
            wt = tl.load(w + at * C * DK + row[None, :] * DK + key[:, None])
            d = tl.load(dstates + at * DK * DV + key[:, None] * DV + col[None, :]) + d * tl.load(e + at) - tl.dot(wt, v)


    @triton.jit
    def _inverse(a, out, C: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * C * C
        row, col = tl.arange(0, C), tl.arange(0, C)
        t = tl.where(row[:, None] == col[None, :], 1.0, 0.0)
        for i in range(1, C):  # row i of the inverse from the rows above it
            ai = tl.load(a + at + i * C + row)
            ai = tl.where(row < i, ai, 0.0)
            new = tl.where(col == i, 1.0, 0.0) - tl.sum(ai[:, None] * t, 0)
            t = tl.where(row[:, None] == i, new[None, :], t)
        tl.store(out + at + row[:, None] * C + col[None, :], t)


BV = 32


def inverse(a):
    """(I + A)^-1 of strictly lower triangular matrices A [..., C, C], by forward substitution."""
    a = a.contiguous()
    out = torch.empty_like(a)
    _inverse[(a.numel() // (a.shape[-1] * a.shape[-1]),)](a, out, a.shape[-1])
    return out


def scan(u, w, k, e):
    """u [N, B, C, DV], w and k [N, B, C, DK], e [N, B, 1, 1] -> vn like u, states [N, B, DK, DV]"""
    n, b, c, dk = k.shape
    u, w, k, e = u.contiguous(), w.contiguous(), k.contiguous(), e.contiguous()
    vn, states = torch.empty_like(u), torch.empty(n, b, dk, u.shape[-1], device=u.device)
    _forward[(b, u.shape[-1] // BV)](u, w, k, e, vn, states, b, n, c, dk, u.shape[-1], BV, num_stages=1)
    return vn, states


def scan_back(dvn, dstates, w, k, e):
    """Gradients of vn and states -> total gradient of vn, gradient of the state after each chunk."""
    n, b, c, dk = k.shape
    w, k, e = w.contiguous(), k.contiguous(), e.contiguous()
    out, ahead = torch.empty_like(dvn), torch.empty_like(dstates)
    _backward[(b, dvn.shape[-1] // BV)](dvn, dstates, w, k, e, out, ahead, b, n, c, dk, dvn.shape[-1], BV, num_stages=1)
    return out, ahead
