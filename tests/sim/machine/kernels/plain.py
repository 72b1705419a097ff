"""Ordinary Triton kernels, one per family of operations; the simulator's results are held against NumPy."""

import triton
import triton.language as tl


@triton.jit
def unary_kernel(x, out, N: tl.constexpr, OP: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "exp":
        r = tl.exp(a)
    elif OP == "exp2":
        r = tl.exp2(a)
    elif OP == "log":
        r = tl.log(a)
    elif OP == "sqrt":
        r = tl.sqrt(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "sin":
        r = tl.sin(a)
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "floor":
        r = tl.floor(a)
    elif OP == "erf":
        r = tl.erf(a)
    elif OP == "neg":
        r = -a
    elif OP == "sigmoid":
        r = tl.sigmoid(a)
    else:
        r = a.to(out.dtype.element_ty)
    tl.store(out + i, r)


@triton.jit
def binary_kernel(x, y, out, n, N: tl.constexpr, OP: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    inside = i < n
    a = tl.load(x + i, mask=inside, other=1)
    b = tl.load(y + i, mask=inside, other=1)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "floordiv":
        r = a // b
    elif OP == "mod":
        r = a % b
    elif OP == "and":
        r = a & b
    elif OP == "or":
        r = a | b
    elif OP == "xor":
        r = a ^ b
    elif OP == "shl":
        r = a << b
    elif OP == "shr":
        r = a >> b
    elif OP == "min":
        r = tl.minimum(a, b)
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "lt":
        r = (a < b).to(tl.int32)
    elif OP == "where":
        r = tl.where(a >= b, a, -b)
    else:
        r = tl.fma(a, b, a)
    tl.store(out + i, r, mask=inside)


@triton.jit
def reduce_kernel(x, out, index, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr, AXIS: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    cols = tl.arange(0, N)[None, :]
    a = tl.load(x + rows * N + cols)
    if OP == "sum":
        r = tl.sum(a, AXIS)
    elif OP == "max":
        r = tl.max(a, AXIS)
    elif OP == "min":
        r = tl.min(a, AXIS)
    elif OP == "xor":
        r = tl.xor_sum(a, AXIS)
    else:
        r, at = tl.max(a, AXIS, return_indices=True)
        tl.store(index + tl.arange(0, M if AXIS == 1 else N), at)
    tl.store(out + tl.arange(0, M if AXIS == 1 else N), r)


@triton.jit
def scalar_reduce_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))


@triton.jit
def _pairs(a0, b0, a1, b1):
    return a1 * a0, a1 * b0 + b1


@triton.jit
def scan_kernel(x, y, out, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "cumsum":
        r = tl.cumsum(a, 0)
    elif OP == "cumprod":
        r = tl.cumprod(a, 0)
    elif OP == "reverse":
        r = tl.cumsum(a, 0, reverse=True)
    else:
        _, r = tl.associative_scan((a, tl.load(y + i)), 0, _pairs)
    tl.store(out + i, r)


@triton.jit
def shape_kernel(x, out, OP: tl.constexpr):
    i = tl.arange(0, 8)[:, None]
    j = tl.arange(0, 16)[None, :]
    a = tl.load(x + i * 16 + j)
    if OP == "trans":
        r = tl.reshape(tl.trans(a), (8, 16))
    elif OP == "join":
        r = tl.reshape(tl.join(a, a + 1), (16, 16))
        r, _ = tl.split(tl.reshape(r, (8, 16, 2)))
    elif OP == "split":
        low, high = tl.split(tl.reshape(a, (8, 8, 2)))
        r = tl.reshape(tl.join(high, low), (8, 16))
    elif OP == "gather":
        r = tl.gather(a, tl.broadcast_to(15 - j, (8, 16)), 1)
    elif OP == "flip":
        r = tl.flip(a, 1)
    else:
        r = tl.sort(a, 1)
    tl.store(out + i * 16 + j, r)


@triton.jit
def histogram_kernel(x, out):
    tl.store(out + tl.arange(0, 16), tl.histogram(tl.load(x + tl.arange(0, 128)), 16))


@triton.jit
def matmul_kernel(a, b, c, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    total = tl.zeros((BLOCK, N), tl.float32)
    for k in range(0, K, BLOCK):
        kk = k + tl.arange(0, BLOCK)
        total = tl.dot(tl.load(a + m[:, None] * K + kk[None, :]), tl.load(b + kk[:, None] * N + n[None, :]), total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def flash_kernel(q, k, v, out, S, scale, D: tl.constexpr, N: tl.constexpr):
    """Attention as a loop over keys; Triton pipelines it and, on sm_100, keeps P and O in tensor memory."""
    M: tl.constexpr = 128
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    query = tl.load(q + m[:, None] * D + d[None, :])
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, S, N):
        keys = tl.load(k + (start + n)[:, None] * D + d[None, :])
        s = tl.dot(query, keys.T) * scale
        new = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(best - new)
        total = total * alpha + tl.sum(p, 1)
        values = tl.load(v + (start + n)[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.bfloat16), values, acc * alpha[:, None])
        best = new
    tl.store(out + m[:, None] * D + d[None, :], acc / total[:, None])


@triton.jit
def atomic_kernel(out, x, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + tl.program_id(0) * N + i)
    if OP == "add":
        tl.atomic_add(out + i % 4, a)
    elif OP == "max":
        tl.atomic_max(out + i % 4, a)
    elif OP == "min":
        tl.atomic_min(out + i % 4, a)
    elif OP == "or":
        tl.atomic_or(out + i % 4, a)
    elif OP == "and":
        tl.atomic_and(out + i % 4, a)
    elif OP == "xor":
        tl.atomic_xor(out + i % 4, a)
    else:
        tl.atomic_xchg(out + tl.program_id(0), tl.program_id(0))


@triton.jit
def lock_kernel(lock, total, N: tl.constexpr):
    """A spin lock around a plain read and write."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + tl.program_id(0))
    tl.atomic_xchg(lock, 0)


@triton.jit
def last_block_kernel(x, part, count, out, N: tl.constexpr, LOCKED: tl.constexpr):
    """Every program sums its part; the last one adds the parts up."""
    p = tl.program_id(0)
    tl.store(part + p, tl.sum(tl.load(x + p * N + tl.arange(0, N)), 0))
    done = tl.atomic_add(count, 1) if LOCKED else tl.atomic_add(count, 1, sem="relaxed")
    if done == tl.num_programs(0) - 1:
        parts = tl.load(part + tl.arange(0, 4))
        tl.store(out, tl.sum(parts, 0))


@triton.jit
def loop_kernel(x, out, n):
    """Collatz steps: a while loop with two carried values, a branch with a result, wrap-around."""
    a = tl.load(x + tl.program_id(0))
    steps = 0
    while a != 1:
        a = a // 2 if a % 2 == 0 else 3 * a + 1
        steps += 1
    for i in range(n):
        steps += i
    tl.store(out + tl.program_id(0), steps)


@triton.jit
def store_kernel(out, offset, SAME: tl.constexpr):
    """Every program writes; to one place if SAME."""
    tl.store(out + (0 if SAME else tl.program_id(0)) + offset, tl.program_id(0))


@triton.jit
def device_descriptor_kernel(x, out, M, N, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    result = tl.make_tensor_descriptor(out, [M, N], [N, 1], [B, B])
    i = tl.program_id(0) * B
    result.store([i, 0], source.load([i, 0]) * 2)


@triton.jit
def all_read_kernel(x, out, count, FAULT: tl.constexpr):
    """Each program copies x, and the last one to say so clears it, by an atomic operation or an ordinary store."""
    lanes = tl.arange(0, 16)
    if FAULT == "reads late" or FAULT == "updates":
        number = tl.atomic_add(count, 1, sem="acq_rel")
        tl.store(out + tl.program_id(0) * 16 + lanes, tl.load(x + lanes))
    else:
        tl.store(out + tl.program_id(0) * 16 + lanes, tl.load(x + lanes))
        number = tl.atomic_add(count, 1, sem="acq_rel")
    if number == tl.num_programs(0) - 1:
        if FAULT == "updates" or FAULT == "updates late":
            tl.atomic_xchg(x + lanes, 0.0, sem="relaxed")
        else:
            tl.store(x + lanes, 0.0)


@triton.jit
def scope_kernel(x, part, count, out, SCOPE: tl.constexpr):
    """The last program to say that its part is there sums them; `out` also has the sum of all by atomic additions."""
    lanes, one = tl.arange(0, 16), tl.program_id(0)
    tl.store(part + one * 16 + lanes, tl.load(x + one * 16 + lanes))
    tl.atomic_add(out + lanes, tl.load(x + one * 16 + lanes), sem="relaxed")
    tl.atomic_add(part + one * 16 + lanes, 0.0, sem="relaxed", scope="cta")
    if tl.atomic_add(count, 1, sem="acq_rel", scope=SCOPE) == tl.num_programs(0) - 1:
        total = tl.zeros([16], tl.float32)
        for i in range(tl.num_programs(0)):
            total += tl.load(part + i * 16 + lanes)
        tl.store(out + 16 + lanes, total)
