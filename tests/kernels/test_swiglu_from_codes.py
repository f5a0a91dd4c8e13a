"""SwiGLU's backward of gate and up as 8-bit codes: bitwise the backward of what was dequantized before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import glu_backward
from kernel_testing import DTYPES, make
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.activation import GATE_ACTIVATIONS as ACTIVATIONS
from recompute.kernels.activation import GLU
from recompute.kernels.blockwise_8bit import FORMATS, dequantize_blockwise, quantize_blockwise
from recompute.kernels.swiglu import glu_backward_from_codes, swiglu

each_format = pytest.mark.parametrize("format", FORMATS)
packed_or_not = pytest.mark.parametrize("packed", [False, True])
BLOCK = 32


def make_codes(*values: Tensor, format: str = "fp8") -> list[Tensor | None]:
    """The codes and scales of gate and up, or of packed ones and no more."""
    found = [each for value in values for each in quantize_blockwise(value, BLOCK, format)]
    return [*found, *[None] * (4 - len(found))]


def make_inputs(
    packed: bool, columns: int = 96, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", format: str = "fp8"
) -> tuple[Tensor, list[Tensor | None]]:
    """dproduct, and codes and scales of gate and up."""
    gate, up = (3 * make(5, columns, seed=seed) for seed in range(2))
    values = [torch.cat([gate, up], -1)] if packed else [gate, up]
    dproduct = make(5, columns, seed=2, device=device, dtype=dtype)
    return dproduct, make_codes(*(value.to(device, dtype) for value in values), format=format)


def two_passes(dproduct: Tensor, codes: list[Tensor | None], activation: str) -> tuple[Tensor | None, ...]:
    gate, up = (
        None if each is None else dequantize_blockwise(each, scales, dproduct.dtype, BLOCK)
        for each, scales in (codes[:2], codes[2:])
    )
    return glu_backward(dproduct, gate, up, activation, True, True, True)


def assert_same(found: Any, expected: Any) -> None:
    for value, truth in zip(found, expected, strict=True):
        assert value is None is truth or (value.dtype is truth.dtype and torch.equal(value, truth))


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(
    packed=st.booleans(),
    columns=st.sampled_from([96, 48, 50, 1]),
    activation=st.sampled_from(ACTIVATIONS),
    format=st.sampled_from([*FORMATS]),
    dtype=st.sampled_from(DTYPES),
)
def test_one_pass_has_the_bits_of_two(
    packed: bool, columns: int, activation: str, format: str, dtype: torch.dtype, device: str
):
    dproduct, codes = make_inputs(packed, columns, dtype, device, format)
    expected = two_passes(dproduct, codes, activation)
    assert_same(glu_backward_from_codes(dproduct, *codes, activation, True, True, True, BLOCK), expected)
    given = [None if value is None else torch.full_like(value, torch.nan) for value in expected[:2]]
    GLU.backward_(overwritten := dproduct.clone(), *codes, *given, BLOCK, activation)
    assert_same((*given, overwritten), expected)


@packed_or_not
def test_gradients_are_near_those_of_what_was_compressed(packed: bool, device: str):
    gate, up = (make(64, 96, seed=seed, device=device).requires_grad_() for seed in range(2))
    values = [torch.cat([gate, up], -1)] if packed else [gate, up]
    dproduct = make(64, 96, seed=2, device=device)
    expected = torch.autograd.grad(swiglu(*values), (gate, up), dproduct)
    for format, bound in (("fp8", 0.04), ("int8", 0.01)):
        dgate, dup, _ = glu_backward_from_codes(dproduct, *make_codes(*values, format=format), "silu", block=BLOCK)
        found = (dgate, dup) if dup is not None else dgate.chunk(2, -1)
        for value, truth in zip(found, expected, strict=True):
            assert (value - truth).norm() <= bound * truth.norm()


@packed_or_not
def test_only_what_is_asked_for_is_made(packed: bool, device: str):
    dproduct, codes = make_inputs(packed, device=device)
    everything = glu_backward_from_codes(dproduct, *codes, "gelu", True, True, True, BLOCK)
    for needed in itertools.product((False, True), repeat=3):
        found = glu_backward_from_codes(dproduct, *codes, "gelu", *needed, BLOCK)
        assert_same(found, [value if need else None for value, need in zip(everything, needed, strict=True)])


@pytest.mark.parametrize(
    ("packed", "columns", "launches"), [(False, 96, 1), (False, 50, 1), (True, 96, 1), (True, 50, 2)]
)
def test_one_launch_where_blocks_are_not_cut(
    packed: bool, columns: int, launches: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    launched = []
    plain = launch.run
    dproduct, codes = make_inputs(packed, columns, device=device)
    monkeypatch.setattr(launch, "run", lambda *args, **settings: launched.append(args) or plain(*args, **settings))
    glu_backward_from_codes(dproduct, *codes, "silu", block=BLOCK)
    assert len(launched) == (launches if launch.uses_triton(dproduct) else 0)


@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 1), lambda x: x.mT])
def test_codes_of_any_dense_strides(change: Callable[[Tensor], Tensor], device: str):
    for packed in (False, True):
        values = [change(make(2, 8, 64, seed=seed, device=device)) for seed in range(2 - packed)]
        codes = make_codes(*values)
        dproduct = make(*swiglu(*values).shape, seed=2, device=device)
        expected = two_passes(dproduct, codes, "silu")
        assert_same(glu_backward_from_codes(dproduct, *codes, "silu", True, True, True, BLOCK), expected)


@packed_or_not
def test_a_gradient_of_any_strides(packed: bool, device: str):
    dproduct, codes = make_inputs(packed, device=device)
    expected = glu_backward_from_codes(dproduct, *codes, "silu", True, True, True, BLOCK)
    for strided in (torch.stack([dproduct, dproduct], -1)[..., 0], dproduct.mT.contiguous().mT):
        found = glu_backward_from_codes(strided, *codes, "silu", True, True, True, BLOCK)
        assert_same(found, expected)
        assert all(value is None or value.is_contiguous() for value in found)


def test_nothing_gives_nothing(device: str):
    empty = torch.empty(0, 32, device=device)
    for value in glu_backward_from_codes(empty, *make_codes(empty, empty), "silu", True, True, True, BLOCK):
        assert value is not None
        assert value.shape == (0, 32)


@packed_or_not
@each_format
def test_ops_pass_opcheck(format: str, packed: bool, device: str):
    # The check of schemas multiplies every argument, which torch's CPU does not do with fp8.
    utilities = ("test_faketensor",) if format == "fp8" else ("test_schema", "test_faketensor")
    dproduct, codes = make_inputs(packed, device=device, format=format)
    arguments = (dproduct, *codes, BLOCK, "silu", True, True, True)
    torch.library.opcheck(torch.ops.recompute.glu_backward.default, arguments, test_utils=utilities)
    given = [None if each is None else torch.zeros_like(each, dtype=dproduct.dtype) for each in codes[::2]]
    in_place = torch.ops.recompute.glu_backward_.default
    torch.library.opcheck(in_place, (dproduct, *codes, *given, BLOCK, "silu"), test_utils=utilities)


@pytest.mark.gpu
@packed_or_not
def test_more_than_2_to_the_31_elements(packed: bool):
    shape = (2**20 + 1, 2**12) if packed else (2**20 + 1, 2**11)
    values = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2 - packed)]
    for seed, value in enumerate(values):
        value[-1:] = make(1, shape[1], seed=seed)
    codes = make_codes(*values)
    last = make_codes(*(value[-1:].clone() for value in values))
    del values
    dproduct = torch.zeros(2**20 + 1, 2**11, device="cuda", dtype=torch.bfloat16)
    dproduct[-1:] = make(1, 2**11, seed=2)
    found = glu_backward_from_codes(dproduct, *codes, "silu", True, True, True, BLOCK)
    expected = glu_backward_from_codes(dproduct[-1:].clone(), *last, "silu", True, True, True, BLOCK)
    assert_same([None if value is None else value[-1:] for value in found], expected)


def call(**changes: Any) -> Any:
    dproduct, codes = make_inputs(False)
    named = dict(zip(("gate", "gate_scales", "up", "up_scales"), codes, strict=True))
    arguments = {"dproduct": dproduct, **named, "activation": "silu", "block": BLOCK}
    return glu_backward_from_codes(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "unknown activation 'relu'; expected one of silu, gelu, gelu_tanh"),
        ({"dproduct": torch.ones(5, 96).double()}, "dproduct is torch.float64"),
        ({"dproduct": torch.ones(5, 95)}, "dproduct has shape (5, 95), gate (5, 96) and up (5, 96); expected (..., I)"),
        ({"up": None, "up_scales": None}, "gate (5, 96) and up None; expected (..., I) for all three, or gate"),
        ({"up": None}, "neither up nor its scales"),
        ({"up_scales": None}, "neither up nor its scales"),
        ({"dproduct": torch.ones(5, 96, device="meta")}, "dproduct is on meta and gate on cpu; expected one device"),
        ({"block": 64}, "glu_backward_from_codes: scales are torch.float32 of shape (15,); expected float32 (8,)"),
        ({"gate": torch.ones(5, 96)}, "glu_backward_from_codes: codes are torch.float32"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        call(**changes)
