"""Matrix product with scales, bias, activation and residual in its epilogue.

Programs walk over the tiles of the output in groups of rows, so that those that run together share their operands in
cache. Sums are in float32, also of float8 products, which the tensor cores add up in fewer bits only within a block.

A product with few rows is a read of b. Where it, or one of some hundred rows, has too few tiles to keep the device busy,
K is split among programs as well, and a second launch adds their sums up, always in the same order.
"""

KERNEL_TYPE = "matmul"
BACKEND = "triton"

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_M = 128  # tune(block): 64, 128, 256
BLOCK_N = 128  # tune(block): 64, 128, 256
BLOCK_K = 64  # tune(memory): 32, 64, 128
WARPS = 8  # tune(launch): 4, 8
STAGES = 4  # tune(memory): 2, 3, 4, 5
WIDE = 256  # tune(block): 64, 128, 256
WIDE_STAGES = 3  # tune(memory): 2, 3, 4
WIDE_FROM = 128  # tune(launch): 64, 128, 1000000
THIN_N = 64  # tune(block): 16, 32, 64, 128
THIN_K = 128  # tune(memory): 64, 128, 256
NARROW_N = 16  # tune(block): 16, 32, 64
NARROW_K = 256  # tune(memory): 64, 128, 256
NARROW_UP_TO = 6144  # tune(block): 0, 4096, 6144, 8192, 16384
THIN_STAGES = 4  # tune(memory): 2, 3, 4, 5, 6
THIN_WARPS = 4  # tune(launch): 2, 4, 8
THIN_PROGRAMS = 192  # tune(launch): 1, 96, 192, 384
PROGRAMS = 128  # tune(launch): 1, 128, 256
GROUP = 8  # tune(memory): 1, 4, 8, 16

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
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
def float8(bits, NATIVE: tl.constexpr):
    """float8_e4m3fn from its bits; where the hardware has no such type, exactly as float16."""
    if NATIVE:
        x = bits.to(tl.float8e4nv, bitcast=True)
    else:
        wide = bits.to(tl.int16)
        # Sign and magnitude in float16's places give the number divided by 2^8: the exponents' biases are 7 and 15.
        placed = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        x = placed.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), x).to(tl.float16)
    return x


@triton.jit
def finish(
    acc,
    bias_ptr,
    residual_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    m,
    n,
    batch,
    bias_step,
    residual_batch,
    residual_row,
    residual_column,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE_A: tl.constexpr,
    HAS_SCALE_B: tl.constexpr,
    LONG: tl.constexpr,
):
    """Everything behind the product, for rows m and columns n of a batch."""
    if HAS_SCALE_A:
        acc *= tl.load(scale_a_ptr).to(tl.float32)
    if HAS_SCALE_B:
        acc *= tl.load(scale_b_ptr).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n * bias_step, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = act(acc, KIND)
    kept = (m < M)[:, None] & (n < N)[None, :]
    if LONG:
        m, n = m.to(tl.int64), n.to(tl.int64)
    if HAS_RESIDUAL:
        residual = (
            residual_ptr + batch * residual_batch + m[:, None] * residual_row + n[None, :] * residual_column
        )
        acc += tl.load(residual, mask=kept, other=0.0).to(tl.float32)
    out = out_ptr + batch * M * N + m[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=kept)


# One row is no case of its own: its loads would be laid out as if they were scalars.
@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    residual_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    K,
    a_batch,
    a_row,
    a_k,
    b_batch,
    b_k,
    b_column,
    bias_step,
    residual_batch,
    residual_row,
    residual_column,
    k_share,
    splits,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE_A: tl.constexpr,
    HAS_SCALE_B: tl.constexpr,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    LONG: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first, last = 0, K
    if SPLIT:
        # Its neighbours share the tile.
        split = program % splits
        program = program // splits
        first = split * k_share
        last = tl.minimum(first + k_share, K)
    batch = (program // (rows * columns)).to(tl.int64)
    program = program % (rows * columns)
    group = program // (GROUP * columns)
    first_row = group * GROUP
    height = tl.minimum(rows - first_row, GROUP)
    row = first_row + (program % (GROUP * columns)) % height
    column = (program % (GROUP * columns)) // height

    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge read others again, and are not stored.
    m_read, n_read = m % M, n % N
    k_step = tl.full((), BLOCK_K, tl.int32)
    if LONG:
        m_read, n_read, k, k_step = (
            m_read.to(tl.int64),
            n_read.to(tl.int64),
            k.to(tl.int64),
            k_step.to(tl.int64),
        )
    a_tile = a_ptr + batch * a_batch + m_read[:, None] * a_row + (first + k)[None, :] * a_k
    b_tile = b_ptr + batch * b_batch + (first + k)[:, None] * b_k + n_read[None, :] * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(a_tile), tl.load(b_tile)
        else:
            a = tl.load(a_tile, mask=(k < K - start)[None, :], other=0)
            b = tl.load(b_tile, mask=(k < K - start)[:, None], other=0)
        if FLOAT8:
            # The tensor cores keep float8 sums in about 14 bits: leave them after each block.
            acc = tl.dot(float8(a, NATIVE), float8(b, NATIVE), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        a_tile += k_step * a_k
        b_tile += k_step * b_k

    if SPLIT:
        # All of a split's sums lie together: (splits, batch, M, N).
        batches = tl.num_programs(0) // (rows * columns * splits)
        kept = (m < M)[:, None] & (n < N)[None, :]
        if LONG:
            m, n = m.to(tl.int64), n.to(tl.int64)
        sums = out_ptr + (split.to(tl.int64) * batches + batch) * M * N
        tl.store(sums + m[:, None] * N + n[None, :], acc, mask=kept)
    else:
        finish(
            acc,
            bias_ptr,
            residual_ptr,
            scale_a_ptr,
            scale_b_ptr,
            out_ptr,
            M,
            N,
            m,
            n,
            batch,
            bias_step,
            residual_batch,
            residual_row,
            residual_column,
            KIND,
            HAS_BIAS,
            HAS_RESIDUAL,
            HAS_SCALE_A,
            HAS_SCALE_B,
            LONG,
        )


@triton.jit
def join_kernel(
    sums_ptr,
    bias_ptr,
    residual_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    bias_step,
    residual_batch,
    residual_row,
    residual_column,
    batches,
    splits,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE_A: tl.constexpr,
    HAS_SCALE_B: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds up the sums of all splits for a part of one row, and finishes it."""
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    batch = (program // columns // M).to(tl.int64)
    m = program // columns % M + tl.arange(0, 1)
    n = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros((1, BLOCK_N), tl.float32)
    sums = sums_ptr + batch * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    step = tl.full((), batches, tl.int64) * M * N
    for _ in range(splits):
        acc += tl.load(sums, mask=kept, other=0.0)
        sums += step
    finish(
        acc,
        bias_ptr,
        residual_ptr,
        scale_a_ptr,
        scale_b_ptr,
        out_ptr,
        M,
        N,
        m,
        n,
        batch,
        bias_step,
        residual_batch,
        residual_row,
        residual_column,
        KIND,
        HAS_BIAS,
        HAS_RESIDUAL,
        HAS_SCALE_A,
        HAS_SCALE_B,
        LONG,
    )


@triton.jit
def wide_kernel(
    a_map,
    b_map,
    bias_ptr,
    residual_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    K,
    bias_step,
    residual_batch,
    residual_row,
    residual_column,
    NT: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE_A: tl.constexpr,
    HAS_SCALE_B: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """matmul_kernel for many tiles of 16-bit matrices without a batch, whose tiles the copy engine fetches."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    first_row = group * GROUP
    height = tl.minimum(rows - first_row, GROUP)
    row = (first_row + (program % (GROUP * columns)) % height) * BLOCK_M
    column = (program % (GROUP * columns)) // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = a_map.load([row, start])
        if NT:
            b = b_map.load([column, start]).T
        else:
            b = b_map.load([start, column])
        acc = tl.dot(a, b, acc)
    finish(
        acc,
        bias_ptr,
        residual_ptr,
        scale_a_ptr,
        scale_b_ptr,
        out_ptr,
        M,
        N,
        row + tl.arange(0, BLOCK_M),
        column + tl.arange(0, BLOCK_N),
        tl.full((), 0, tl.int64),
        bias_step,
        residual_batch,
        residual_row,
        residual_column,
        KIND,
        HAS_BIAS,
        HAS_RESIDUAL,
        HAS_SCALE_A,
        HAS_SCALE_B,
        LONG,
    )


def batched(x):
    """Three strides; a matrix without a batch does not move with it."""
    return x.stride() if x.dim() == 3 else (0, *x.stride())


def reach(x):
    """The farthest element of a matrix, from its first."""
    return (x.shape[-2] - 1) * x.stride(-2) + (x.shape[-1] - 1) * x.stride(-1)


def mapped(x, rows, columns):
    """A matrix's tensor map, with boxes of rows x columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def has_map(x):
    """Whether a matrix has a tensor map: rows dense, 16-byte aligned, and not over each other."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def has_float8():
    """Whether the tensor cores of the present GPU take float8_e4m3fn."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 89


def blocks(M, N, K, itemsize, nt):
    """Tile, warps, stages, and whether there are many tiles: a thin product has its programs along N."""
    wide = False
    if itemsize == 4:
        # float32 has no tensor cores without rounding: its operands stand in registers.
        block_m, block_n, block_k, warps, stages = 64, 64, 16, 4, STAGES
        if M <= 32:
            block_m, block_n, block_k = 16 if M <= 16 else 32, 32, 32
    elif M <= 64:
        block_m, block_n, block_k = 16 if M <= 16 else 32 if M <= 32 else 64, THIN_N, THIN_K
        if M > 32:
            block_n, block_k = max(block_n, 64), block_k // 2
        elif N * K < 1 << 22:
            block_n = 32
        elif N <= NARROW_UP_TO:
            block_n, block_k = NARROW_N, NARROW_K
        block_k, warps, stages = block_k * 2 // itemsize, THIN_WARPS, THIN_STAGES
    else:
        block_m, block_n, block_k, warps, stages = BLOCK_M, BLOCK_N, BLOCK_K * 2 // itemsize, WARPS, STAGES
        # Many tiles: the wide side is along a's rows where b is dense along K, else along b's columns.
        wide_m, wide_n = (WIDE, block_n) if nt else (block_m, WIDE)
        wide = itemsize == 2 and triton.cdiv(M, wide_m) * triton.cdiv(N, wide_n) >= WIDE_FROM
        if wide:
            block_m, block_n, stages = wide_m, wide_n, WIDE_STAGES
    return block_m, min(block_n, max(16, triton.next_power_of_2(N))), block_k, warps, stages, wide


def kernel_fn(a, b, bias=None, residual=None, activation="none", scale_a=None, scale_b=None):
    if a.dtype not in DTYPES or b.dtype != a.dtype or activation not in KINDS:
        raise NotImplementedError(f"product of {a.dtype} and {b.dtype} with {activation}")
    lead, (M, K), N = a.shape[:-2], a.shape[-2:], b.shape[-1]
    if b.shape[-2] != K or b.shape[:-2] not in (lead, ()) or len(lead) > 1:
        raise ValueError(f"product of {a.shape} and {b.shape}")
    is_float8 = a.dtype == torch.float8_e4m3fn
    out = torch.empty((*lead, M, N), dtype=torch.bfloat16 if is_float8 else a.dtype, device=a.device)
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"bias of {bias.shape} for {N} columns")
    if residual is not None and residual.shape != out.shape:
        raise ValueError(f"residual of {residual.shape} for {out.shape}")
    if out.numel() == 0:
        return out
    B = lead[0] if lead else 1
    itemsize, nt = a.element_size(), b.stride(-2) == 1 and b.stride(-1) != 1
    block_m, block_n, block_k, warps, stages, wide = blocks(M, N, K, itemsize, nt)
    added = out if residual is None else residual
    tiles = B * triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    splits, k_share, sums = 1, K, out
    wanted = 1
    if itemsize <= 2 and M > 64 and not wide:
        wanted = PROGRAMS
    elif M <= 64 and (M > 32 or tiles <= THIN_PROGRAMS // 4):
        wanted = THIN_PROGRAMS
    if wanted > tiles:
        # A share has two blocks at least.
        splits = max(min(wanted // tiles, K // (2 * block_k), 16), 1)
        k_share = triton.cdiv(triton.cdiv(K, splits), block_k) * block_k
        splits = max(triton.cdiv(K, max(k_share, 1)), 1)
    if splits > 1:
        sums = torch.empty((splits, B, M, N), dtype=torch.float32, device=a.device)
    # A tile reads up to BLOCK_K past the last element of a row before it is masked.
    far = max(reach(a), reach(b), reach(added), M * N) + 2 * block_k * max(a.stride(-1), b.stride(-2))
    behind = {
        "KIND": activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_SCALE_A": scale_a is not None,
        "HAS_SCALE_B": scale_b is not None,
        "LONG": far >= 2**31,
    }
    if wide and not lead and itemsize == 2 and has_map(a) and has_map(b.T if nt else b):
        wide_kernel[(tiles,)](
            mapped(a, block_m, block_k),
            mapped(b.T, block_n, block_k) if nt else mapped(b, block_k, block_n),
            out if bias is None else bias,
            added,
            out if scale_a is None else scale_a,
            out if scale_b is None else scale_b,
            out,
            M,
            N,
            K,
            1 if bias is None else bias.stride(0),
            *batched(added),
            NT=nt,
            **behind,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=GROUP,
            num_warps=warps,
            num_stages=stages,
        )
        return out
    matmul_kernel[(tiles * splits,)](
        a.view(torch.uint8) if is_float8 else a,
        b.view(torch.uint8) if is_float8 else b,
        out if bias is None else bias,
        added,
        out if scale_a is None else scale_a,
        out if scale_b is None else scale_b,
        sums,
        M,
        N,
        K,
        *batched(a),
        *batched(b),
        1 if bias is None else bias.stride(0),
        *batched(added),
        k_share,
        splits,
        **behind,
        SPLIT=splits > 1,
        FLOAT8=is_float8,
        NATIVE=is_float8 and has_float8(),
        EVEN_K=K % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        join_n = min(256, triton.next_power_of_2(N))
        join_kernel[(B * M * triton.cdiv(N, join_n),)](
            sums,
            out if bias is None else bias,
            added,
            out if scale_a is None else scale_a,
            out if scale_b is None else scale_b,
            out,
            M,
            N,
            1 if bias is None else bias.stride(0),
            *batched(added),
            B,
            splits,
            **behind,
            BLOCK_N=join_n,
            num_warps=2,
        )
    return out
