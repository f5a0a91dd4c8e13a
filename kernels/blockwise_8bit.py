"""Blockwise quantization: a tensor as codes of 8 bits, and one scale for each block of consecutive elements.

With x of N elements in the order of their memory, cut into ceil(N / block) blocks, the last maybe shorter:

    absmax = max |x| of the block's finite elements    (blocks,)
    scale  = fp8:  the least power of 2 with absmax / scale <= 448, the largest number of e4m3
             int8: absmax / 127                        (blocks,), float32, at least 2⁻¹²⁶
    code   = x / scale, rounded to the nearest code    (N,), to even where two are as near
    y      = code · scale, in the dtype that is asked for

Held are 1 + 4 / block bytes an element: 0.516 of bfloat16's for blocks of 128. Moved are an element's own bytes and
those, once each way.

How far y is from x, with u the dtype's own rounding, 2⁻⁸ for bfloat16, 2⁻¹¹ for float16 and 2⁻²⁴ for float32:

- fp8: |y - x| <= max(2⁻⁴ · |x|, 2⁻¹⁰ · scale). A code has three bits behind its leading one, so neighbours lie at most
  2⁻³ of a value apart, and rounding moves it by half of that. Codes below 2⁻⁶ are 2⁻⁹ apart. As absmax / scale is more
  than 224, half of that is less than 2⁻¹⁷ · absmax. Nothing else rounds: a power of 2 scales exactly, and any of the
  dtypes holds a code's four bits.
- int8: |y - x| <= (1 + 2⁻¹⁴) · absmax / 254 + u · |y|. Codes are one scale apart, and rounding moves by half of that.
  2⁻¹⁴ is for the roundings of float32 on the way; u is for y's own, to the dtype.

At the small end of a dtype's range two things add to both bounds. No scale is below 2⁻¹²⁶: a block of smaller values
comes back on the grid of that scale (fp8: to 2⁻¹³⁶, int8: to 2⁻¹²⁷). And a subnormal number of the dtype is a multiple
of its smallest one, so y may be off by half of that.

NaN and both infinities come back as NaN: e4m3 has a code for NaN and none for infinity, and in int8 the code -128,
which nothing else uses, stands for NaN. They have no influence on the other elements of their block. Zeros come back as
zeros. Finite values come back finite: a value that would be rounded up beyond the dtype's largest number is rounded
down instead, and still within the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.compression import Codes
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The dtype of the codes of each format."""


@jit
def block_tile(N, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's blocks, (BLOCKS,), the offsets of their elements, (BLOCKS, BLOCK), and masks of what exists."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return blocks, offsets, blocks * BLOCK < N, offsets < N


@jit
def decoded(codes, scales, DTYPE: tl.constexpr):
    """The values of codes (BLOCKS, BLOCK) with scales (BLOCKS,): rounded to DTYPE, as float32."""
    values = codes.to(tl.float32) * scales[:, None]
    if codes.dtype == tl.int8:
        values = tl.where(codes == -128, float("nan"), values)
    return values.to(DTYPE).to(tl.float32)


@jit
def _scales(absmax, INT8: tl.constexpr, TOP: tl.constexpr):
    """Scales, what to multiply by to divide by them, and the largest code to use."""
    if INT8:
        # At least 2⁻¹²⁶, so that 1 / scale is finite, and at most the largest number that is finite times 127.
        scales = tl.minimum(tl.maximum(tl.div_rn(absmax, 127.0), 1.1754943508222875e-38), 2.6793883890187504e36)
        return scales, tl.div_rn(1.0, scales), tl.full(absmax.shape, 127.0, tl.float32)
    # 448 is 1.75 · 2⁸: a significand above 1.75 carries into the exponent and takes the next power of 2.
    exponents = (absmax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    # Above the dtype's own largest power of 2, the next code after 240 would stand for a number that the dtype lacks.
    limits = tl.where(exponents > TOP, 240.0, 448.0)
    exponents = tl.maximum(exponents - 8, 1)
    scales = (exponents << 23).to(tl.float32, bitcast=True)
    return scales, ((254 - exponents) << 23).to(tl.float32, bitcast=True), limits


@jit
def _quantize_kernel(x, codes, scales, error, N, TOP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    blocks, offsets, block_mask, mask = block_tile(N, BLOCK, BLOCKS)
    v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.abs(v)
    finite = magnitude < float("inf")
    absmax = tl.max(tl.where(finite, magnitude, 0.0), 1)
    s, inverse, limit = _scales(absmax, INT8, TOP)
    scaled = v * inverse[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -limit[:, None]), limit[:, None])
    if INT8:
        scaled = (scaled + 12582912.0) - 12582912.0  # the nearest integer: float32 holds no fractions at 1.5 · 2²³
        c = tl.where(finite, scaled, -128.0).to(tl.int8)
    else:
        c = tl.where(finite, scaled, float("nan")).to(codes.dtype.element_ty)
    tl.store(codes + offsets, c, mask=mask)
    tl.store(scales + blocks, s, mask=block_mask)
    if error is not None:
        distance = tl.abs(decoded(c, s, x.dtype.element_ty) - v)
        worst = tl.max(tl.where(finite, distance, 0.0), 1)
        relative = tl.div_rn(worst, tl.where(absmax > 0.0, absmax, 1.0))
        tl.atomic_max(error, tl.max(relative, 0), sem="relaxed")  # a maximum is the same in any order


@jit
def _dequantize_kernel(codes, scales, y, N, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    blocks, offsets, block_mask, mask = block_tile(N, BLOCK, BLOCKS)
    c = tl.load(codes + offsets, mask=mask)
    s = tl.load(scales + blocks, mask=block_mask, other=0.0)
    tl.store(y + offsets, decoded(c, s, y.dtype.element_ty).to(y.dtype.element_ty), mask=mask)


BLOCK = 128
"""Consecutive elements that share a scale, unless a caller says otherwise."""
LARGEST_BLOCK = 4096
QUANTIZE_TILE = 4096
"""Elements a program. Smaller tiles would make more programs, and each updates the one error."""
# Without fused multiply-adds, so that a kernel rounds where the reference does, and gives the same bits.
QUANTIZE_SETTINGS = {"num_warps": 4, "enable_fp_fusion": False}
DEQUANTIZE_TILE = 1024
"""Elements a program, or one block if that is more: 8 a thread, which then stores 16 bytes of 16-bit values at once."""
DEQUANTIZE_SETTINGS = {"num_warps": 4}


def quantize_blockwise(x: Tensor, block: int = BLOCK, format: str | None = None) -> tuple[Tensor, Tensor]:
    """``x`` as codes of 8 bits and scales: see above for the formula and for how far the values then are.

    No gradient flows through. The result does not depend on where it runs, to the bit.

    Args:
        x: float16, bfloat16 or float32; any shape. Dense memory is read where it is, whatever the order of the
            dimensions in it. Anything else (a slice, an expanded tensor) is copied first.
        block: consecutive elements in memory that share a scale; a power of 2 up to 4096.
        format: ``fp8`` (e4m3) or ``int8``; None for what suits the device, see ``native_format``.

    Returns:
        codes: of ``x``'s shape, and of its strides if it is dense; ``torch.float8_e4m3fn`` or ``torch.int8``.
        scales: (ceil(N / block),), float32.

    Raises:
        KernelError: for other dtypes, blocks or formats, and for ``fp8`` on a GPU that cannot convert to it.

    >>> codes, scales = quantize_blockwise(torch.ones(2, 128))
    >>> dequantize_blockwise(codes, scales, torch.float32).unique()
    tensor([1.])
    """
    _check_quantize(x, block, format)
    codes, scales, _ = quantize_op(x, block, format, False)
    return codes, scales


def quantize_blockwise_with_error(
    x: Tensor, block: int = BLOCK, format: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_blockwise``, and the worst error in the same pass.

    Args:
        x, block, format: as for ``quantize_blockwise``.

    Returns:
        codes, scales: those of ``quantize_blockwise``.
        error: the largest of |y - x| / absmax over all finite elements, with y in ``x``'s dtype and absmax of the
            element's block: at most 2⁻⁴ for fp8, and about 1 / 254 + u for int8. A float32 of no dimensions on
            ``x``'s device; the host does not wait for it.

    Raises:
        KernelError: as ``quantize_blockwise`` does.
    """
    _check_quantize(x, block, format)
    return quantize_op(x, block, format, True)


def dequantize_blockwise(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """The values that ``codes`` and ``scales`` of ``quantize_blockwise`` stand for.

    Args:
        codes: any shape, dense; ``torch.float8_e4m3fn`` or ``torch.int8``.
        scales: (ceil(N / block),), float32.
        dtype: float16, bfloat16 or float32. Finite values come back finite in the dtype that was quantized; a
            narrower one may overflow.
        block: the one that ``quantize_blockwise`` was given.

    Returns:
        Of the shape and the strides of ``codes``.

    Raises:
        KernelError: for other dtypes, blocks or numbers of scales, codes that are not dense, or several devices.
    """
    check_codes("dequantize_blockwise", codes, scales, block)
    launch.check_dtype("dequantize_blockwise", "dtype", dtype)
    return dequantize_op(codes, scales, dtype, block)


class Blockwise8Bit:
    """The codec of regions that compress: ``native_format``, with one scale for 128 elements."""

    def encode(self, tensor: Tensor) -> Codes:
        return Codes(*quantize_blockwise_with_error(tensor))

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_blockwise(codes, scales, dtype)


@functools.cache
def native_format(device: torch.device) -> str:
    """``fp8`` on the CPU and on NVIDIA GPUs from compute capability 8.9 on, which convert to it; else ``int8``."""
    if device.type in ("cpu", "meta"):
        return "fp8"
    if device.type != "cuda" or torch.version.hip is not None:
        return "int8"
    if not torch.cuda.is_available():  # a fake tensor stands for one on a GPU that is elsewhere
        return "fp8"
    return "fp8" if torch.cuda.get_device_capability(device) >= (8, 9) else "int8"


def _check_quantize(x: Tensor, block: int, format: str | None) -> None:
    op = "quantize_blockwise"
    launch.check_dtype(op, "x", x.dtype)
    _check_block(op, block)
    if format is not None:
        launch.check_one_of(op, "format", format, FORMATS)
        _check_format(op, format, x.device)


def check_codes(op: str, codes: Tensor, scales: Tensor, block: int) -> None:
    """Refuse codes and scales that ``quantize_blockwise`` does not make.

    Raises:
        KernelError: for another dtype, block or number of scales, codes that are not dense, or several devices.
    """
    launch.check_dtype(op, "the dtype of codes", codes.dtype, FORMATS.values())
    _check_block(op, block)
    _check_format(op, "int8" if codes.dtype is torch.int8 else "fp8", codes.device)
    blocks = -(-codes.numel() // block)
    if scales.dtype is not torch.float32 or scales.shape != (blocks,) or not scales.is_contiguous():
        raise KernelError(
            f"{op}: scales are {scales.dtype} of shape {tuple(scales.shape)}; expected float32 ({blocks},), "
            f"contiguous, for {codes.numel()} codes in blocks of {block}."
        )
    if codes.device != scales.device:
        raise KernelError(f"{op}: codes are on {codes.device} and scales on {scales.device}; expected one device.")
    if not codes.is_contiguous() and torch.empty_like(codes, device="meta").stride() != codes.stride():
        raise KernelError(
            f"{op}: codes of shape {tuple(codes.shape)} have strides {codes.stride()}; expected dense memory, as "
            "quantize_blockwise returns it. Slice or expand after dequantize_blockwise."
        )


def _check_block(op: str, block: int) -> None:
    if not 0 < block <= LARGEST_BLOCK or block & (block - 1):
        raise KernelError(f"{op}: block is {block}; expected a power of 2 from 1 to {LARGEST_BLOCK}.")


def _check_format(op: str, format: str, device: torch.device) -> None:
    if format == "fp8" and native_format(device) != "fp8":
        raise KernelError(
            f"{op}: {device} has no fp8; expected an NVIDIA GPU of compute capability 8.9 or newer, or the CPU. Use "
            "format='int8' or None."
        )


def _quantize(
    x: Tensor, block: int, format: str | None, with_error: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    if not launch.uses_triton(x):
        yield quantize_blockwise_reference(x, block, format, with_error)
        return
    codes, scales, error = results = _allocated(x, block, format, with_error)
    yield results
    if error is not None:
        error.zero_()
    if codes.stride() != x.stride():  # not dense
        x = x.clone()
    constants = {"TOP": _largest_exponent(x.dtype), "BLOCK": block, "BLOCKS": QUANTIZE_TILE // block}
    programs = -(-x.numel() // QUANTIZE_TILE)
    launch.run(_quantize_kernel, programs, x, codes, scales, error, x.numel(), **constants, **QUANTIZE_SETTINGS)


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Iterator[Tensor]:
    if not launch.uses_triton(scales):
        yield dequantize_blockwise_reference(codes, scales, dtype, block)
        return
    y = torch.empty_like(codes, dtype=dtype)
    yield y
    blocks = max(DEQUANTIZE_TILE // block, 1)
    programs, constants = -(-y.numel() // (blocks * block)), {"BLOCK": block, "BLOCKS": blocks}
    launch.run(_dequantize_kernel, programs, codes, scales, y, y.numel(), **constants, **DEQUANTIZE_SETTINGS)


def _largest_exponent(dtype: torch.dtype) -> int:
    """The exponent of the dtype's largest number, as float32 writes it."""
    return 142 if dtype is torch.float16 else 254


def quantize_blockwise_reference(
    x: Tensor, block: int = BLOCK, format: str | None = None, with_error: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``quantize_blockwise`` in plain PyTorch, with the same bits; the last is the error, if it is asked for."""
    x = x.detach()
    codes, scales, error = _allocated(x, block, format, with_error)
    if codes.stride() != x.stride():  # not dense
        x = x.clone()
    v = _blocks(x, block).float()
    finite = v.abs() < torch.inf
    absmax = torch.where(finite, v.abs(), 0.0).amax(1, keepdim=True)
    if codes.dtype is torch.int8:
        s = (absmax / absmax.new_full((), 127)).clamp(2.0**-126, 2.6793883890187504e36)
        c = torch.where(finite, (v * (1 / s)).clamp(-127, 127).round(), -128).to(torch.int8)
    else:
        exponents = (absmax.view(torch.int32) + 0x1FFFFF) >> 23
        limits = torch.where(exponents > _largest_exponent(x.dtype), 240.0, 448.0)
        exponents = (exponents - 8).clamp_min(1)
        s, inverse = (exponents << 23).view(torch.float32), ((254 - exponents) << 23).view(torch.float32)
        c = torch.where(finite, (v * inverse).clamp(-limits, limits), torch.nan).to(torch.float8_e4m3fn)
    _in_memory_order(codes).copy_(c.flatten()[: x.numel()])
    scales.copy_(s.flatten())
    if error is not None:
        distance = torch.where(finite, (_decoded(c, s, x.dtype).float() - v).abs(), 0.0).amax(1, keepdim=True)
        relative = distance / torch.where(absmax > 0, absmax, 1.0)
        error.zero_()
        if x.numel():
            error.copy_(relative.max())
    return codes, scales, error


def dequantize_blockwise_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """``dequantize_blockwise`` in plain PyTorch, with the same bits."""
    y = torch.empty_like(codes, dtype=dtype)
    values = _decoded(_blocks(codes, block), scales[:, None], dtype)
    _in_memory_order(y).copy_(values.flatten()[: y.numel()])
    return y


def _decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    values = codes.float() * scales
    return (values.masked_fill(codes == -128, torch.nan) if codes.dtype is torch.int8 else values).to(dtype)


def _in_memory_order(x: Tensor) -> Tensor:
    """The elements of a dense tensor as they follow each other in memory: (N,), a view."""
    return x.as_strided((x.numel(),), (1,))


def _blocks(x: Tensor, block: int) -> Tensor:
    """A dense tensor in memory order as (blocks, block), filled up with zeros."""
    x = _in_memory_order(x)
    if fill := -x.numel() % block:
        x = F.pad(x.view(torch.uint8), (0, fill)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, fill))
    return x.view(-1, block)


def _allocated(x: Tensor, block: int, format: str | None, with_error: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = torch.empty_like(x, dtype=FORMATS[format or native_format(x.device)], requires_grad=False)
    scales = x.new_empty((-(-x.numel() // block),), dtype=torch.float32)
    return codes, scales, x.new_empty((), dtype=torch.float32) if with_error else None


quantize_op = launch.register(
    "quantize_blockwise(Tensor x, int block, str? format, bool with_error)"
    " -> (Tensor codes, Tensor scales, Tensor? error)",
    _quantize,
)
dequantize_op = launch.register(
    "dequantize_blockwise(Tensor codes, Tensor scales, ScalarType dtype, int block) -> Tensor y", _dequantize
)
