"""What a decoder layer computes between its products and its attention: the kernels of `layer`.

Arithmetic is float32, rounded to the dtype of the tensors where transformers rounds.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(x, like):
    """x as the dtype of the pointer `like` holds it, in float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _product(x, y, like):
    """x * y, `_rounded`: as a sum with 0, for a product next to another sum becomes one fma, which rounds once."""
    return _rounded(tl.fma(x, y, tl.zeros_like(x)), like)


@triton.jit
def norm(X, DELTA, SUM, WEIGHT, OUT, eps, s_x, s_d, N: tl.constexpr, NP: tl.constexpr, ADDED: tl.constexpr):
    """OUT [rows, N]: RMSNorm by WEIGHT [N] of X, a program a row; with ADDED of X + DELTA, which goes to SUM [rows, N].

    s_x, s_d: from row to row of X and DELTA; all last strides are 1.
    """
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, NP)
    m_n = o_n < N
    b_w = tl.load(WEIGHT + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_x = tl.load(X + row * s_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ADDED:
        b_x = _rounded(b_x + tl.load(DELTA + row * s_d + o_n, mask=m_n, other=0.0).to(tl.float32), SUM)
        tl.store(SUM + row * N + o_n, b_x.to(SUM.dtype.element_ty), mask=m_n)
    b_x = _rounded(b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / N + eps), OUT)
    tl.store(OUT + row * N + o_n, (b_x * b_w).to(OUT.dtype.element_ty), mask=m_n)


@triton.jit
def rotate(QKV, COS, SIN, Q_WEIGHT, K_WEIGHT, eps, HQ, KH, T, s_r, s_cb, s_ct, D: tl.constexpr, HALF: tl.constexpr,
           HP: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr):
    """The HQ + KH heads of D in front of each row of QKV are rotated in place: elements d and HALF + d by an angle.

    COS, SIN: [B, T, 2 * HALF] for row b * T + t, both of the strides s_cb, s_ct and 1. NORMED: each head is normed
    first, by Q_WEIGHT [D] or K_WEIGHT [D], and 2 * HALF is D. s_r: from row to row. A program takes HEADS of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, HP)
    m_d = o_d < HALF
    m_h = (head < HQ + KH)[:, None] & m_d[None, :]
    at = QKV + row * s_r + head[:, None] * D + o_d[None, :]
    b_x = tl.load(at, mask=m_h, other=0.0).to(tl.float32)
    b_y = tl.load(at + HALF, mask=m_h, other=0.0).to(tl.float32)
    if NORMED:
        m_q = m_h & (head < HQ)[:, None]
        m_k = m_h & (head >= HQ)[:, None]
        scale = tl.rsqrt((tl.sum(b_x * b_x, 1) + tl.sum(b_y * b_y, 1)) / D + eps)[:, None]
        q, k = Q_WEIGHT + o_d[None, :], K_WEIGHT + o_d[None, :]
        w_x = tl.load(q, mask=m_q, other=0.0).to(tl.float32) + tl.load(k, mask=m_k, other=0.0).to(tl.float32)
        w_y = (tl.load(q + HALF, mask=m_q, other=0.0).to(tl.float32)
               + tl.load(k + HALF, mask=m_k, other=0.0).to(tl.float32))
        b_x = _rounded(_rounded(b_x * scale, QKV) * w_x, QKV)
        b_y = _rounded(_rounded(b_y * scale, QKV) * w_y, QKV)
    angle = (row // T) * s_cb + (row % T) * s_ct + o_d
    c_x = tl.load(COS + angle, mask=m_d, other=0.0).to(tl.float32)[None, :]
    c_y = tl.load(COS + angle + HALF, mask=m_d, other=0.0).to(tl.float32)[None, :]
    s_x = tl.load(SIN + angle, mask=m_d, other=0.0).to(tl.float32)[None, :]
    s_y = tl.load(SIN + angle + HALF, mask=m_d, other=0.0).to(tl.float32)[None, :]
    x = _product(b_x, c_x, QKV) - _product(b_y, s_x, QKV)
    y = _product(b_y, c_y, QKV) + _product(b_x, s_y, QKV)
    tl.store(at, x.to(QKV.dtype.element_ty), mask=m_h)
    tl.store(at + HALF, y.to(QKV.dtype.element_ty), mask=m_h)


@triton.jit
def gate(GATE_UP, OUT, N, s_r, COLUMNS: tl.constexpr):
    """OUT [rows, N] = silu(g) * u, where a row of GATE_UP is N values g and then N values u; s_r: from row to row."""
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_n = o_n < N
    b_g = tl.load(GATE_UP + row * s_r + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_u = tl.load(GATE_UP + row * s_r + N + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_g = _rounded(b_g / (1.0 + tl.exp(-b_g)), OUT)
    tl.store(OUT + row * N + o_n, (b_g * b_u).to(OUT.dtype.element_ty), mask=m_n)
