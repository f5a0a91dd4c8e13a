"""Dropout in generated kernels: its random numbers are those that ATen's kernel draws."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generated_testing import interpreted, kernels_made, wait_for, written
from torch import nn

import recompute
from recompute.compiled.generated import device_functions
from recompute.kernels.launch import jit, tl


def philox(seed, counters):
    """Philox4x32-10, of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    low, high, c = seed & 0xFFFFFFFF, seed >> 32, [each.astype(np.uint64) for each in counters]
    for _ in range(10):
        first, other = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
        c = [other >> half ^ c[1] ^ np.uint64(low), other & mask, first >> half ^ c[3] ^ np.uint64(high), first & mask]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c


@jit
def mask_kernel(out, seed, offset, vector, threads):
    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + a, device_functions.is_kept(seed, offset, tl.program_id(0), 0.7, vector, threads, 1024))


@interpreted
@pytest.mark.parametrize(
    ("vector", "threads", "seed", "offset"), [(8, 256, 1234567890123, 8), (4, 512, 2**63 + 5, 2**34 + 4)]
)
def test_each_thread_of_atens_kernel_has_numbers_of_its_own(vector, threads, seed, offset):
    place = np.arange(8192)
    found = torch.empty(len(place), dtype=torch.bool)
    mask_kernel[(len(place) // 1024,)](found, seed - (seed >> 63 << 64), offset, vector, threads)
    turn, four = place // vector, place % vector // 4
    counter = offset // 4 + turn // threads * (vector // 4) + four
    drawn = philox(seed, [counter & 0xFFFFFFFF, counter >> 32, turn % threads, np.zeros_like(place)])
    uniform = np.choose(place % 4, drawn).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    assert (found.numpy() == (uniform < np.float32(0.7))).all()


def gradient_alone(x):
    _, mask = torch.ops.aten.native_dropout(x, 0.1, True)
    return torch.ops.aten.native_dropout_backward(x, mask, 1 / 0.9) + x


FUNCTIONS = {
    "dropout": (lambda x: F.dropout(x, 0.1), 1),
    "of what the group computes": (lambda x: F.dropout(x * 2, 0.5) + x, 1),
    "two of one tensor": (lambda x: (F.dropout(x, 0.05), F.dropout(x, 0.3) * 2), 1),
    "mask": (lambda x: torch.ops.aten.native_dropout(x, 0.1, True), 1),
    "mask alone": (gradient_alone, 1),
    "read in another order": (lambda x: (F.dropout(x, 0.1).mT + 1).contiguous(), 1),
}
"""Functions, and the kernels that each becomes. A mask that is read in another order is ATen's."""
SHAPES = {"large": (3, 1024, 4096), "small": (16, 64), "odd": (3, 5, 4)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_draws_atens_numbers(name, shape, dtype):
    function, kernels = FUNCTIONS[name]
    torch.cuda.manual_seed(2**63 + 11)
    x = torch.randn(SHAPES[shape], device="cuda").to(dtype)
    code, numbers = written(function, x)
    outputs = [code.tensors[number] for number in numbers]
    run = code.compiled(["def run(t0):"], f"({', '.join(outputs)},)", [*outputs, "t0"])
    assert len(run.kernels) == kernels
    before = torch.cuda.get_rng_state()
    expected = function(x)
    after = torch.cuda.get_rng_state()
    for _ in range(3):
        torch.cuda.set_rng_state(before)
        found = run(x)
        assert torch.equal(torch.cuda.get_rng_state(), after)
        for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
        for kernel in run.kernels:
            kernel._compiled.result()
    assert [kernel.is_exact for kernel in run.kernels] == [True] * kernels


class Adapted(nn.Module):
    """A frozen Linear beside thin ones behind dropouts, as LoRA has them."""

    def __init__(self, size):
        super().__init__()
        self.norm, self.base = nn.LayerNorm(size), nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 8), nn.Linear(8, size)

    def forward(self, x):
        y = self.norm(x)
        return x + F.dropout(F.gelu(self.base(y) + self.up(self.down(F.dropout(y, 0.05)))), 0.1)


class TestRegions:
    def test_an_estimate_without_a_gpu_is_of_captured_code(self):
        model, x = nn.Sequential(*[Adapted(256) for _ in range(3)]).bfloat16(), torch.randn(64, 256).bfloat16()
        captured, taped = (
            recompute.estimate(model, batch=x, policy={"rules": [rule]}, gpu="H200", advise=False).peak_bytes
            for rule in ({"type": "Adapted", "action": "recompute", "capture": capture} for capture in (True, False))
        )
        assert captured < taped

    @staticmethod
    def twins(dtype):
        """A model, the same under a policy, the kernels of the latter, and what gives these their first calls."""
        torch.manual_seed(0)
        plain = nn.Sequential(*[Adapted(256) for _ in range(3)]).to("cuda", dtype)
        lean = copy.deepcopy(plain)
        recompute.apply(lean, {"rules": [{"type": "Adapted", "action": "recompute", "via": "hook"}]})
        x = torch.randn(64, 256, device="cuda", dtype=dtype)
        with kernels_made() as made:
            for _ in range(10):
                lean(x).sum().backward()
                wait_for(made)
        return plain, lean, made, x

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_model_draws_what_it_draws_without_a_policy(self, dtype):
        plain, lean, made, x = self.twins(dtype)
        for step in range(3):
            for model in (plain, lean):
                torch.manual_seed(step)
                model.zero_grad()
                y = model(x)
                if step == 1:
                    torch.manual_seed(99)  # others seed between forward and backward
                y.pow(2).sum().backward()
                torch.rand(1, device="cuda")
            for one, other in zip(plain.parameters(), lean.parameters(), strict=True):
                assert (one.grad is None) is (other.grad is None)
                assert one.grad is None or torch.equal(one.grad, other.grad)
        drawing = [kernel for kernel in made if "dropout_mask" in kernel.name]
        assert len({kernel.source for kernel in drawing}) >= 2
        assert [kernel.reason for kernel in made if kernel.reason] == []
        assert {kernel.is_exact for kernel in drawing if kernel._compiled is not None} == {True}

    @pytest.mark.gpu
    def test_no_mask_is_held(self):
        plain, lean, _, x = self.twins(torch.bfloat16)
        held = {}
        for name, model in (("plain", plain), ("lean", lean)):
            before = torch.cuda.memory_allocated()
            y = model(x)
            held[name] = torch.cuda.memory_allocated() - before
            y.sum().backward()
            model.zero_grad()
        assert held["lean"] < held["plain"] / 2
