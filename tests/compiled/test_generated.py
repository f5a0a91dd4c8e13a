"""Captured code in generated kernels: the same bits, fewer kernels, nothing written that only a group reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generated_testing import as_one_kernel, written
from torch import Tensor, nn
from torch.nn import functional as F

import recompute
from recompute.compiled.generated import device_functions, generated_kernel
from recompute.compiled.generated.fusing import fused
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.index_forms import Form
from recompute.compiled.generated.switch import generating_on

interpreted = pytest.mark.skipif(not device_functions.is_interpreted, reason="Triton's interpreter is off")


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


def rotation_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, shape = gradient.shape[-1] // 2, list(gradient.shape)
    turned, slice_backward = gradient * sin, torch.ops.aten.slice_backward
    left = slice_backward(-turned[..., :half], shape, 3, half, shape[-1], 1)
    return left + slice_backward(turned[..., half:], shape, 3, 0, half, 1) + gradient * cos


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


GROUPS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "broadcast over rows and columns": (lambda x, w, r: x * w + r * 2, [draw(6, 8), draw(8), draw(6, 1)]),
    "a scalar tensor": (lambda x, s: x * s + 1, [draw(5, 7), draw(1).reshape(())]),
    "views between calls": (lambda x, y: (x.exp().view(2, 3, 8) + y).transpose(0, 1) * 2, [draw(6, 8), draw(2, 3, 8)]),
    "transposed inputs": (lambda x, y: (x.t() + y).neg(), [draw(9, 5), draw(5, 9)]),
    "copies to another order": (lambda x: (x.transpose(1, 2) + 1).contiguous().mul(3), [draw(2, 4, 6, 8)]),
    "slices": (lambda x: x[:, 2:6] * x[:, 4:8] - x[:, :4], [draw(5, 9)]),
    "strided slices": (lambda x: x[:, ::2] * x[:, 1::2] + 1, [draw(5, 8)]),
    "rotary embeddings": (rotated, [draw(2, 6, 3, 8).transpose(1, 2), draw(1, 1, 6, 8), draw(1, 1, 6, 8)]),
    "their backward": (rotation_backward, [draw(2, 3, 6, 8), draw(1, 1, 6, 8), draw(1, 1, 6, 8)]),
    "several outputs": (lambda g, a, b: (g * b, g * a, (a * b).exp()), [draw(4, 6)] * 1 + [draw(6, 4).t(), draw(4, 6)]),
    "casts": (lambda x: (x.to(torch.float16).mul(3).float() + 1, x * 2), [draw(4, 6)]),
    "masks": (lambda x, y: torch.where(x > y, x, y).masked_fill(x == y, 0.5) * (x > 0), [draw(4, 6), draw(4, 6) * 2]),
}


@interpreted
@pytest.mark.parametrize("name", GROUPS)
def test_one_kernel_computes_a_group_of_calls(name: str) -> None:
    function, given = GROUPS[name]
    found, expected = as_one_kernel(function, *given)()
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_gives_the_bits_of_aten(name: str, dtype: torch.dtype) -> None:
    function, given = GROUPS[name]
    found, expected = as_one_kernel(function, *[each.to("cuda", dtype) for each in given])()
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


def kernels_of(function: Callable[..., Any], *given: Tensor) -> tuple[list[GeneratedKernel], list[str]]:
    """The kernels that a function's calls become, and the lines that remain of ATen's."""
    code, numbers = written(function, *given)
    names: dict[str, Any] = dict(code.names)
    statements = fused(code.statements, [code.tensors[number] for number in numbers], code.recording, names)
    kernels = [value for value in names.values() if isinstance(value, GeneratedKernel)]
    return kernels, [statement.text for statement in statements if "aten_" in statement.text]


class TestGrouping:
    def test_what_only_a_group_reads_never_reaches_memory(self) -> None:
        kernels, others = kernels_of(lambda x: ((x * 2).exp() + 1).tanh(), draw(64))
        assert others == []
        assert [kernel.source.count("tl.store") for kernel in kernels] == [1]

    def test_a_cast_is_made_in_each_group_that_reads_it(self) -> None:
        def norm(x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        kernels, others = kernels_of(norm, draw(8, 16).bfloat16())
        assert len(kernels) == 2
        assert [line.partition(" = ")[2].partition("(")[0] for line in others] == ["aten_mean_dim"]
        assert all("tl.float32" in kernel.source for kernel in kernels)
        assert [kernel.source.count("tl.store") for kernel in kernels] == [1, 1]

    def test_a_gemm_between_two_calls_keeps_them_apart(self) -> None:
        kernels, others = kernels_of(lambda x, w: ((x * 2).exp() @ w * 3).tanh(), draw(8, 8), draw(8, 8))
        assert len(kernels) == 2
        assert len(others) == 1

    def test_groups_that_read_the_same_become_one(self) -> None:
        kernels, others = kernels_of(lambda g, a, b: (g * a, g * b), draw(64), draw(64), draw(64))
        assert len(kernels) == 1
        assert others == []

    def test_a_gemm_waits_for_a_group_that_needs_another(self) -> None:
        """Backward of a gated MLP: what it multiplies is made in the pass that makes the gradients."""

        def backward(a: Tensor, b: Tensor, gradient: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            product = a * b
            of_weight = gradient.t() @ product
            inner = gradient @ w
            return of_weight, inner * b, inner * a

        kernels, others = kernels_of(backward, draw(8, 8), draw(8, 8), draw(8, 8), draw(8, 8))
        assert len(kernels) == 1
        assert len(others) == 2

    def test_memory_that_nobody_reads_afterwards_is_written_to(self) -> None:
        kernels, _ = kernels_of(lambda x, w: (x @ w).exp() * 2, draw(8, 8), draw(8, 8))
        assert kernels[0]._reused == {0: 0}
        kernels, _ = kernels_of(lambda x: x.exp() * 2, draw(8, 8))
        assert kernels[0]._reused == {}

    def test_what_is_not_in_the_table_stays_with_aten(self) -> None:
        kernels, others = kernels_of(lambda x: torch.erfinv(x * 0.1) + torch.lgamma(x), draw(64))
        assert kernels == []
        assert len(others) == 4


@interpreted
@pytest.mark.parametrize("action", [{"action": "recompute", "via": "hook"}, {"action": "checkpoint"}], ids=str)
def test_a_captured_region_in_generated_kernels_is_exact(action: dict[str, str]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return x + self.down(F.relu(hidden) * hidden * 0.5) * 0.25

    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    lean = copy.deepcopy(plain)
    made: list[GeneratedKernel] = []
    with generating_on("cpu"), pytest.MonkeyPatch.context() as patch:
        own = GeneratedKernel.__init__
        patch.setattr(GeneratedKernel, "__init__", lambda self, *args: (own(self, *args), made.append(self))[0])
        recompute.apply(lean, {"version": 1, "rules": [{"type": "Block", **action}]})
        for step in range(10):
            x = draw(4, 8) + step
            for net in (plain, lean):
                net.zero_grad()
                net(x).pow(2).sum().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), lean.parameters(), strict=True))
            for kernel in made:
                if kernel._compiled is not None:
                    kernel._compiled.result()
    assert any(kernel.is_exact for kernel in made)
    assert [kernel.reason for kernel in made if kernel.reason] == []


class TestAtRunTime:
    @staticmethod
    def kernel(source: str, aten: Callable[..., Any]) -> GeneratedKernel:
        from recompute.engine.cut.layout import Layout

        return GeneratedKernel(source, aten, 1024, [Layout.of(torch.empty(1024))])

    SOURCE = (
        "def doubled(p0, p1):\n    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)\n"
        "    tl.store(p1 + a, tl.load(p0 + a) * {factor})\n"
    )

    def test_aten_runs_until_the_kernel_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting: list[Any] = []
        monkeypatch.setattr(
            generated_kernel,
            "_compilers",
            lambda: type("Never", (), {"submit": lambda *a: waiting.append(a) or Never()}),
        )

        class Never:
            def done(self) -> bool:
                return False

        kernel = self.kernel(self.SOURCE.format(factor=2.0), lambda x: (x * 2,))
        x = draw(1024)
        assert torch.equal(kernel(x)[0], x * 2)
        assert len(waiting) == 1
        assert not kernel.is_exact

    @interpreted
    def test_a_kernel_of_other_bits_never_runs_again(self) -> None:
        kernel = self.kernel(self.SOURCE.format(factor=2.5), lambda x: (x * 2,))
        x = draw(1024)
        for _ in range(3):
            assert torch.equal(kernel(x)[0], x * 2)
            assert kernel._compiled is not None
            kernel._compiled.result()
        assert kernel.reason == "its first call did not give ATen's bits"


class TestIndexForms:
    @pytest.mark.parametrize(("shape", "divisor", "modulus"), [(24, 4, 3), (24, 1, 4), (24, 12, 2), (24, 2, 6)])
    def test_a_digit_of_a_variable(self, shape: int, divisor: int, modulus: int) -> None:
        form = Form.of_variable("a", shape).digit(divisor, modulus)
        assert [eval(str(form), {"a": a}) for a in range(shape)] == [a // divisor % modulus for a in range(shape)]

    def test_digits_that_count_on_are_one(self) -> None:
        a = Form.of_variable("a", 24)
        low, high = a.digit(1, 4), a.digit(4, 6)
        assert low is not None
        assert high is not None
        assert str(Form.total([(low, 1), (high, 4)])) == "a"

    def test_a_digit_that_is_no_sum_of_digits_has_no_form(self) -> None:
        assert Form.of_variable("a", 30).digit(4, 3) is None
