"""The examples in the docstrings of public functions run, on the CPU, and give what stands there."""

import doctest
import importlib
import inspect

import pytest
import torch

import recompute

OPS = (
    *("blockwise_8bit", "cross_entropy", "gated_mlp", "layer_norm", "linear_cross_entropy", "linear_divergence"),
    *("linear_log_probs", "mlp", "rms_norm", "rope", "swiglu"),
)
MODULES = {inspect.getmodule(getattr(recompute, name)) for name in set(recompute.__all__) - {"errors"}}
MODULES |= {importlib.import_module(name) for name in ("recompute.units", *(f"recompute.kernels.{op}" for op in OPS))}


def examples():
    known = {"torch": torch, "recompute": recompute}
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in MODULES for test in finder.find(module, extraglobs=known)]
    return sorted((test for test in found if test.examples), key=lambda test: test.name)


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_an_example_gives_what_its_docstring_says(example):
    assert doctest.DocTestRunner().run(example).failed == 0


def test_each_public_function_has_an_example():
    named = {test.name for test in examples()}
    assert {f"recompute.kernels.{op}.{op}" for op in OPS if op != "blockwise_8bit"} <= named
    public = {name: getattr(recompute, name) for name in set(recompute.__all__) - {"errors"}}
    assert {f"{value.__module__}.{name}" for name, value in public.items()} <= named
