"""Settings measured on one GPU compile for it and for others, and fit the shared memory that those have."""

import importlib.util
import os
import subprocess
import sys

import pytest

KIBIBYTE = 1024
GPUS = {"H200": (90, 228 * KIBIBYTE), "A100": (80, 164 * KIBIBYTE), "RTX 4090": (89, 100 * KIBIBYTE)}
"""Compute capability, and bytes of shared memory a multiprocessor; a program may have all but one KiB."""

COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from recompute.kernels import activation, blockwise_8bit, cross_entropy_rows, divergence_rows, norm_kernels, norm_tiles

capability, shared = int(sys.argv[1]), int(sys.argv[2])
norm_tiles._shared_memory = lambda device: shared
device = torch.device("cpu")

OPTIONS = "num_warps", "num_stages", "enable_fp_fusion"

def fits(kernel, arguments, constants):
    '''arguments: a Triton type, or a constant, for each parameter in order.'''
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    names = kernel.arg_names
    given = dict(zip(names, [*arguments, *("constexpr" for _ in names[len(arguments):])], strict=True))
    signature = {name: kind if isinstance(kind, str) else "constexpr" for name, kind in given.items()}
    fixed = {name: value for name, value in given.items() if signature[name] == "constexpr"} | constants
    pointers = [place for place, kind in enumerate(signature.values()) if kind[0] == "*"]
    attributes = {(place,): [["tt.divisibility", 16]] for place in pointers}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, attributes)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(kernel.__name__, fixed, compiled.metadata.shared)
    assert compiled.metadata.shared <= shared - 1024, (kernel.__name__, fixed, compiled.metadata.shared)

X, F = "*bf16", "*fp32"
for hidden in (64, 128, 1024, 4096, 5120, 16384, 65536):
    for mean in (None, F):
        tiles = norm_tiles.tiles_of(False, hidden, 6, device, mean is not None)
        dots, shifts = F if tiles.wide else None, mean if tiles.wide else None
        fits(norm_kernels._backward_kernel, [X, X, X, mean, F, dots, shifts, X, X, F, mean, *["i32"] * 5],
             {"CASTING": "llama" if mean is None else "layer_norm", "ROWS": tiles.rows, **tiles.constants})
for hidden in (128, 5120, 65536):
    for kind, nbytes in ((X, 2), (F, 4)):
        tiles = norm_tiles.tiles_of(True, hidden, 4 * nbytes, device)
        kernel = norm_kernels._wide_forward_kernel if tiles.wide else norm_kernels._forward_kernel
        rows = {} if tiles.wide else {"ROWS": tiles.rows}
        fits(kernel, [kind, kind, kind, None, kind, kind, None, F, *["i32"] * 5, "fp32"],
             {"CASTING": "llama", **rows, **tiles.constants})
        fits(kernel, [kind, kind, kind, kind, kind, kind, F, F, *["i32"] * 5, "fp32"],
             {"CASTING": "layer_norm", **rows, **tiles.constants})
CODES, BLOCKS = "*fp8e4nv" if capability >= 89 else "*i8", {"BLOCK": 128, "BLOCKS": 32}
fits(blockwise_8bit._quantize_kernel, [X, CODES, F, F, "i64"],
     {"TOP": 254, **BLOCKS, **blockwise_8bit.QUANTIZE_SETTINGS})
fits(blockwise_8bit._dequantize_kernel, [CODES, F, X, "i64"], {**BLOCKS, **blockwise_8bit.DEQUANTIZE_SETTINGS})
I, ROWS = "i32", {"PACKED": False, "BLOCK": activation.TILE, "BLOCKS": 1, **activation.SETTINGS}
def backward(gate, scales, up, numbers, constants):
    dup, up_scales = (None, None) if up is None else (X, scales)
    fits(activation._backward_kernel, [X, gate, scales, up, up_scales, X, dup, X, *numbers], constants)
for packed in (False, True):
    backward(CODES, F, CODES, ["i64", I, I, I, I],
             {"ACTIVATION": "silu", "PACKED": packed, **BLOCKS, **activation.SETTINGS})
for name in activation.ACTIVATIONS:
    forward = {"ACTIVATION": name, "BLOCK": activation.TILE, **activation.SETTINGS}
    fits(activation._forward_kernel, [X, None, X, I, I, I, I], dict(forward))
    fits(activation._forward_kernel, [X, X, X, I, I, I, I], dict(forward))
    backward(X, None, None, [I] * 5, {"ACTIVATION": name, **ROWS})
    backward(X, None, X, [I] * 5, {"ACTIVATION": name, **ROWS})
    backward(CODES, F, None, [I] * 5, {"ACTIVATION": name, "PACKED": False, **BLOCKS, **activation.SETTINGS})
L, S, rows = "*i64", "fp32", cross_entropy_rows
for form, words, entropy, extra in ((0, 1, None, None), (2, 1, F, F), (1, 64, F, None), (2, 0, None, None)):
    constants, count = {"FORM": form, "TARGETS": words, **rows.WIDE_SETTINGS}, I if words > 1 else words
    fits(rows._statistics_kernel, [X, L, extra, F, F, extra, entropy, None, F, *[I] * 4, S, S, count], dict(constants))
    if words:
        fits(rows._gradient_kernel, [X, X, L, extra, extra, F, F, entropy, *[I] * 5, *[S] * 5, count], constants)
for kind in range(4):
    constants = {"KIND": kind, "STUDENT": 2, "TEACHER": 1, **rows.WIDE_SETTINGS}
    fits(divergence_rows._sums_kernel, [X, X, *[F] * 5, F if kind > 1 else None, I, I, I, *[S] * 5], dict(constants))
    fits(divergence_rows._divergence_gradient_kernel, [X, X, *[F] * 6, I, I, I, *[S] * 6], constants)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is published for Linux only")
@pytest.mark.parametrize("name", GPUS)
def test_settings_fit_the_gpu_on_which_they_were_measured_and_others(name):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, *map(str, GPUS[name])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("_kernel") == 75
