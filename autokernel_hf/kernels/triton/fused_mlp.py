"""A feed-forward block in two launches: the up and gate products with the activation between them, then the down product.

The hidden values are rounded to x's dtype between the two, as between a model's own modules; all sums are in float32.
"""

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"

import math

import torch
import triton
import triton.language as tl

BLOCK_M = 128  # tune(block): 64, 128, 256
BLOCK_H = 128  # tune(block): 32, 64, 128
BLOCK_N = 128  # tune(block): 64, 128, 256
BLOCK_K = 64  # tune(memory): 32, 64, 128
THIN = 32  # tune(block): 16, 32, 64, 128
GROUP = 8  # tune(memory): 1, 4, 8, 16
WARPS = 8  # tune(launch): 4, 8
UP_STAGES = 3  # tune(memory): 2, 3, 4
DOWN_STAGES = 4  # tune(memory): 2, 3, 4, 5

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("none", "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "silu", "relu", "relu2")


@triton.jit
def act(x, KIND: tl.constexpr):
    """The activation of a float32 tile. Smooth kinds give NaN at -inf, as torch's do."""
    y = x
    if KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh" or KIND == "gelu_new":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif KIND == "relu2":
        y = tl.where(x <= 0.0, 0.0, x)
        y = y * y
    return y


@triton.jit
def tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a program's tile: down GROUP rows before the next column, for the sake of the cache."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_row = program // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first_row, GROUP)
    within = program % (GROUP * columns)
    return first_row + within % height, within // height


@triton.jit
def up_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    h_ptr,
    M,
    D,
    H,
    x_row,
    x_k,
    gate_row,
    gate_k,
    up_row,
    up_k,
    gate_bias_step,
    up_bias_step,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    LONG: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, column = tile_of(tl.program_id(0), M, H, BLOCK_M, BLOCK_N, GROUP)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the edge read others again, and are not stored.
    m_read, n_read = m % M, n % H
    k_step = tl.full((), BLOCK_K, tl.int32)
    if LONG:
        m_read, n_read, k, k_step = (
            m_read.to(tl.int64),
            n_read.to(tl.int64),
            k.to(tl.int64),
            k_step.to(tl.int64),
        )
    x_tile = x_ptr + m_read[:, None] * x_row + k[None, :] * x_k
    up_tile = up_ptr + n_read[None, :] * up_row + k[:, None] * up_k
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        gate_tile = gate_ptr + n_read[None, :] * gate_row + k[:, None] * gate_k
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_tile), tl.load(up_tile)
        else:
            x = tl.load(x_tile, mask=(k < D - start)[None, :], other=0.0)
            w = tl.load(up_tile, mask=(k < D - start)[:, None], other=0.0)
        up = tl.dot(x, w, up, input_precision="ieee")
        if GATED:
            if EVEN_K:
                w = tl.load(gate_tile)
            else:
                w = tl.load(gate_tile, mask=(k < D - start)[:, None], other=0.0)
            gate = tl.dot(x, w, gate, input_precision="ieee")
            gate_tile += k_step * gate_k
        x_tile += k_step * x_k
        up_tile += k_step * up_k

    if HAS_UP_BIAS:
        up += tl.load(up_bias_ptr + n * up_bias_step, mask=n < H, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_GATE_BIAS:
            gate += tl.load(gate_bias_ptr + n * gate_bias_step, mask=n < H, other=0.0).to(tl.float32)[None, :]
        h = act(gate, KIND) * up
    else:
        h = act(up, KIND)
    kept = (m < M)[:, None] & (n < H)[None, :]
    if LONG:
        m, n = m.to(tl.int64), n.to(tl.int64)
    tl.store(h_ptr + m[:, None] * H + n[None, :], h.to(h_ptr.dtype.element_ty), mask=kept)


@triton.jit
def down_kernel(
    h_ptr,
    down_ptr,
    bias_ptr,
    out_ptr,
    M,
    H,
    D,
    down_row,
    down_k,
    bias_step,
    HAS_BIAS: tl.constexpr,
    LONG: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, column = tile_of(tl.program_id(0), M, D, BLOCK_M, BLOCK_N, GROUP)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read, n_read = m % M, n % D
    k_step = tl.full((), BLOCK_K, tl.int32)
    if LONG:
        m_read, n_read, k, k_step = (
            m_read.to(tl.int64),
            n_read.to(tl.int64),
            k.to(tl.int64),
            k_step.to(tl.int64),
        )
    h_tile = h_ptr + m_read[:, None] * H + k[None, :]
    down_tile = down_ptr + n_read[None, :] * down_row + k[:, None] * down_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        if EVEN_K:
            h, w = tl.load(h_tile), tl.load(down_tile)
        else:
            h = tl.load(h_tile, mask=(k < H - start)[None, :], other=0.0)
            w = tl.load(down_tile, mask=(k < H - start)[:, None], other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
        h_tile += k_step
        down_tile += k_step * down_k
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n * bias_step, mask=n < D, other=0.0).to(tl.float32)[None, :]
    kept = (m < M)[:, None] & (n < D)[None, :]
    if LONG:
        m, n = m.to(tl.int64), n.to(tl.int64)
    tl.store(out_ptr + m[:, None] * D + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=kept)


def reach(x):
    """The farthest element of a matrix, from its first."""
    return (x.shape[0] - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1)


def blocks(M, N, block_n, itemsize):
    """Tile and warps: a thin product has its programs along N; float32 operands stand in registers."""
    if itemsize < 4:
        block_m, block_k, warps = BLOCK_M, BLOCK_K, WARPS
    else:
        block_m, block_n, block_k, warps = 64, min(block_n, 64), 16, 4
    if M <= 32:
        block_m, block_n, block_k, warps = 16 if M <= 16 else 32, THIN, block_k * 2, 4
    elif M <= 64:
        block_m, warps = 64, 4
    return block_m, min(block_n, max(16, triton.next_power_of_2(N))), block_k, warps


def kernel_fn(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, activation="silu"):
    gated = w_gate is not None
    if x.dtype not in DTYPES or activation not in KINDS:
        raise NotImplementedError(f"feed-forward block of {x.dtype} with {activation}")
    if any(w.dtype != x.dtype for w in (w_gate, w_up, w_down) if w is not None):
        raise NotImplementedError(f"feed-forward block of {x.dtype} with weights of {w_up.dtype}")
    (H, D), M = w_up.shape, math.prod(x.shape[:-1])
    if x.shape[-1] != D or w_down.shape != (D, H) or (gated and w_gate.shape != (H, D)):
        raise ValueError(f"feed-forward block of {x.shape} with weights of {w_up.shape} and {w_down.shape}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.dim() != 2:
        x = x.contiguous().view(M, D)
    h = torch.empty((M, H), dtype=x.dtype, device=x.device)
    gate = w_gate if gated else w_up
    farthest = max(reach(w) for w in (x, gate, w_up, w_down))
    # A tile reads up to a block past the last element of a row before it is masked.
    slack = 256 * max(x.stride(1), gate.stride(1), w_up.stride(1), w_down.stride(1))
    long = max(farthest, M * H, M * D) + slack >= 2**31
    if H:
        # Two accumulators where there is a gate: half the columns each.
        columns = BLOCK_H if gated else max(BLOCK_H, BLOCK_N)
        block_m, block_n, block_k, warps = blocks(M, H, columns, x.element_size())
        up_kernel[(triton.cdiv(M, block_m) * triton.cdiv(H, block_n),)](
            x,
            gate,
            w_up,
            x if b_gate is None else b_gate,
            x if b_up is None else b_up,
            h,
            M,
            D,
            H,
            *x.stride(),
            *gate.stride(),
            *w_up.stride(),
            1 if b_gate is None else b_gate.stride(0),
            1 if b_up is None else b_up.stride(0),
            KIND=activation,
            GATED=gated,
            HAS_GATE_BIAS=b_gate is not None,
            HAS_UP_BIAS=b_up is not None,
            LONG=long,
            EVEN_K=D % block_k == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=GROUP,
            num_warps=warps,
            num_stages=UP_STAGES,
        )
    block_m, block_n, block_k, warps = blocks(M, D, BLOCK_N, x.element_size())
    down_kernel[(triton.cdiv(M, block_m) * triton.cdiv(D, block_n),)](
        h,
        w_down,
        x if b_down is None else b_down,
        out,
        M,
        H,
        D,
        *w_down.stride(),
        1 if b_down is None else b_down.stride(0),
        HAS_BIAS=b_down is not None,
        LONG=long,
        EVEN_K=H % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        num_warps=warps,
        num_stages=DOWN_STAGES,
    )
    return out
