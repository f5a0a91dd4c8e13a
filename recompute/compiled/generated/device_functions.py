"""One element of each ATen op in Triton: the operations of ATen's CUDA kernels, in their order.

All of them compute in float32. nvcc makes one ``fma`` of a product and a sum where it can, and so ``fma`` stands here
where its kernel has one: Triton makes none by itself under its settings here. ``tests/compiled/test_generated_ops.py``
compares each of them with ATen, bit for bit.

A function whose last parameter is ``dtype`` rounds to the tensor's dtype after each step, as ATen does.
"""

from __future__ import annotations

from recompute.kernels.launch import jit, tl

try:
    from triton import knobs  # type: ignore[import-untyped]
    from triton.language.extra import libdevice  # type: ignore[import-untyped]

    is_interpreted = bool(knobs.runtime.interpret)
    # The interpreter has no libdevice: there the functions are NumPy's, and bits are those of ATen on a GPU alone.
    math = tl if is_interpreted else libdevice
except ImportError:  # without Triton nothing is generated
    is_interpreted, math = False, None


@jit
def add_scaled(x, y, alpha):
    return tl.fma(alpha, y, x)


@jit
def negate(x):
    return (x.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)


@jit
def magnitude(x):
    return (x.to(tl.int32, bitcast=True) & 2147483647).to(tl.float32, bitcast=True)


@jit
def reciprocal(x):
    return 1.0 / x if x.dtype == tl.float64 else tl.div_rn(1.0, x)  # which takes float32 alone


@jit
def is_tiny(x):
    """Whether a number has no full precision. Triton's libdevice takes such numbers for 0, and ATen does not."""
    return tl.abs(x) < 1.1754943508222875e-38


@jit
def sine(x):
    return tl.where(is_tiny(x), x, math.sin(x))


@jit
def exp2(x):
    """As CUDA computes it where the result has no full precision: Triton's libdevice gives 0 there."""
    half = math.exp2(0.5 * x)
    return tl.where(x < -126.0, half * half, math.exp2(x))


@jit
def reciprocal_square_root(x):
    return tl.where(is_tiny(x), math.rsqrt(x * 16777216.0) * 4096.0, math.rsqrt(x))


if is_interpreted:

    @jit
    def tanh(x):
        return 1.0 - 2.0 / (math.exp(2.0 * x) + 1.0)

else:

    @jit
    def tanh(x):
        return tl.where(is_tiny(x), x, math.tanh(x))


@jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + math.exp(-x))


@jit
def silu(x):
    return tl.div_rn(x, 1.0 + math.exp(-x))


@jit
def silu_backward(gradient, x):
    s = tl.div_rn(1.0, 1.0 + math.exp(-x))
    return gradient * s * tl.fma(x, 1.0 - s, 1.0)


@jit
def gelu_tanh(x):
    inner = 0.7978845834732056 * tl.fma(x * x * x, 0.044714998453855515, x)
    return 0.5 * x * (1.0 + tanh(inner))


@jit
def cube(x, dtype):
    return (x * x).to(dtype).to(tl.float32) * x


@jit
def sigmoid_backward(gradient, y, dtype):
    return (gradient * (1.0 - y).to(dtype).to(tl.float32)).to(dtype).to(tl.float32) * y


@jit
def tanh_backward(gradient, y, dtype):
    if dtype == tl.float32:
        rest = tl.fma(-y, y, 1.0)
    else:
        rest = (1.0 - (y * y).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return gradient * rest


@jit
def gelu_tanh_backward(gradient, x):
    square = x * x
    t = tanh(0.7978845834732056 * tl.fma(square * x, 0.044714998453855515, x))
    slope = 0.7978845834732056 * tl.fma(square, 0.13414499163627625, 1.0)
    rest = (0.5 * x) * tl.fma(-t, t, 1.0) * slope
    return gradient * tl.fma(1.0 + t, 0.5, rest)


@jit
def error_function(x):
    """CUDA's erff since 12.0: Triton brings an older one, which rounds otherwise."""
    size = tl.abs(x)
    far = size >= 1.002959966659546
    s = tl.where(far, size, x * x)
    p = tl.where(far, 0.00011219871521461755, 8.483494457323104e-05)
    p = tl.fma(p, s, tl.where(far, -0.0013275252422317863, -0.0008213091641664505))
    p = tl.fma(p, s, tl.where(far, 0.00839653518050909, 0.005213488824665546))
    p = tl.fma(p, s, tl.where(far, -0.04024658352136612, -0.026868773624300957))
    p = tl.fma(p, s, tl.where(far, 0.15950430929660797, 0.11284004896879196))
    p = tl.fma(p, s, tl.where(far, 0.9129176735877991, -0.37612664699554443))
    p = tl.fma(p, s, tl.where(far, 0.6290600299835205, 0.12837915122509003))
    start = tl.where(far, -size, x)
    p = tl.fma(p, start, start)
    tail = 1.0 - tl.exp2(p)
    return tl.where(far, tl.where(x < 0.0, -tail, tail), p)


@jit
def gelu(x):
    return x * 0.5 * (1.0 + error_function(x * 0.7071067690849304))


@jit
def gelu_backward(gradient, x):
    density = math.exp(-0.5 * x * x) * 0.3989422917366028
    return gradient * tl.fma(1.0 + error_function(x * 0.7071067690849304), 0.5, x * density)


@jit
def relu(x):
    return tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))


@jit
def is_kept(seed, offset, program, probability, vector: tl.constexpr, threads: tl.constexpr, block: tl.constexpr):
    """Which of a program's elements ATen's dropout keeps, by its state: see ``dropout.DropoutMask``."""
    four = program * (block // 4) + tl.arange(0, block // 4)
    turn = four // (vector // 4)
    counter = offset // 4 + (turn // threads) * (vector // 4) + four % (vector // 4)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, (turn % threads).to(tl.uint32), low * 0)
    drawn = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (block,))
    return tl.fma(drawn.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10) < probability


if is_interpreted:

    @jit
    def rounded_to_float8(x, dtype: tl.constexpr):
        """ATen's arithmetic: the interpreter's own rounds otherwise."""
        shift: tl.constexpr = 20 if dtype == tl.float8e4nv else 21
        bias: tl.constexpr = 7 if dtype == tl.float8e4nv else 15
        bits = x.to(tl.int32, bitcast=True) & 2147483647
        tiny: tl.constexpr = (127 - bias + shift + 1) << 23
        small = (tl.abs(x) + tl.full((), tiny, tl.int32).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - tiny
        usual = (bits + ((bias - 127) << 23) + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift
        found = tl.where(bits < ((128 - bias) << 23), small, usual)
        return (found | (x.to(tl.int32, bitcast=True) >> 24 & 128)).to(tl.uint8)

else:

    @jit
    def rounded_to_float8(x, dtype: tl.constexpr):
        return x.to(dtype).to(tl.uint8, bitcast=True)


@jit
def to_float8(
    x, dtype: tl.constexpr, limit: tl.constexpr, over: tl.constexpr, endless: tl.constexpr, nan: tl.constexpr
):
    """A GPU's cast, and ATen's bits for numbers larger than ``limit``."""
    size = tl.abs(x)
    other = tl.where(size == size, tl.where(size == float("inf"), endless, over), nan)
    other = (other | (x.to(tl.int32, bitcast=True) >> 24 & 128)).to(tl.uint8)
    return tl.where(size <= limit, rounded_to_float8(x, dtype), other).to(dtype, bitcast=True)


@jit
def floor_divide(x, number):
    """Of integers, by a positive one. Triton rounds towards zero."""
    rest = x % number
    return (x - tl.where(rest < 0, rest + number, rest)) // number
