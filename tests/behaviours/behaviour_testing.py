"""What the tests of behaviours share: the policies that they run under, and a comparison with the plain module."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from engine_testing import assert_same, leaves, outcome, weak
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recompute

RERUN_AND_KEEP_ARE_BUILT = True
"""Whether rules take ``rerun`` and ``keep``, and ``recompute.keep`` a name. Until then nothing runs under them."""

REGIONS = ["layers.*", "inside"]
"""What the policies below govern: the layers of a stack, and the module inside of a holder."""

Setting = dict[str, Any]
CHECKPOINT: Setting = {"action": "checkpoint"}
RECOMPUTE: Setting = {"action": "recompute", "via": "hook"}
TAPES: dict[str, Setting] = {"recompute": RECOMPUTE}
"""Settings under which backward runs ops again, and no Python."""
if RERUN_AND_KEEP_ARE_BUILT:
    TAPES |= {
        "recompute with gemms": {**RECOMPUTE, "rerun": ["gemm"]},
        "checkpoint without attention": {**CHECKPOINT, "keep": ["attention"]},
    }
SETTINGS = {"checkpoint": CHECKPOINT, **TAPES}


def governing(setting: Setting, *match: str) -> dict[str, Any]:
    """The policy that puts what ``match`` names, or else every region, under ``setting``."""
    return {"rules": [{"match": list(match) or REGIONS, **setting}]}


every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
every_policy = pytest.mark.parametrize("rules", [governing(setting) for setting in SETTINGS.values()], ids=SETTINGS)
every_tape = pytest.mark.parametrize("rules", [governing(setting) for setting in TAPES.values()], ids=TAPES)


def assert_as_without(
    model: nn.Module, rules: dict[str, Any], run: Callable[[Any], Any], *, drops: bool = True
) -> None:
    """``run(model)`` gives the same values bit for bit, and leaves the random stream alike, under ``rules`` as without.

    drops: something must be dropped, or else the comparison would show nothing.
    """
    under = copy.deepcopy(model)
    expected = _observed(run, model)
    with recompute.apply(under, rules) as handle:
        assert_same(_observed(run, under), expected)
        if drops and handle.stats().dropped_nbytes == 0:  # a first frame may begin like one of which more was kept
            _observed(run, under)
        assert not drops or handle.stats().dropped_nbytes > 0


def _observed(run: Callable[[Any], Any], model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(7)
    result = run(model)
    found = result if type(result) is dict else {f"value {index}": leaf for index, leaf in enumerate(leaves(result))}
    found = {**found, "random stream": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["random stream of the device"] = torch.cuda.get_rng_state()
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def assert_step_as_without(
    model: nn.Module,
    rules: dict[str, Any],
    *inputs: Any,
    drops: bool = True,
    backwards: int = 2,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Backwards through one forward give the outputs, gradients, buffers and random stream of the plain model."""
    step = functools.partial(outcome, backwards=backwards)
    assert_as_without(model, rules, lambda model: step(model, *inputs, around=around()), drops=drops)


def module_of(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module that runs ``forward(self, *args)``; ``parts`` become its attributes."""
    module = type("Body", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


@contextmanager
def collector_off() -> Iterator[None]:
    """What dies here dies by reference count, and ``gc.collect`` tells how many objects have not."""
    gc.collect()
    gc.freeze()  # so that collecting takes no time
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Census(TorchDispatchMode):
    """Knows every storage that ops make while it is in force, and which of them are still alive."""

    __module__ = "recompute.testing"  # the engine trusts it then, as it does torch's own modes, and shows it all

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                self._made[key] = weak(tensor), tensor.untyped_storage().nbytes()
        return result

    def alive_nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


class ExpWith(torch.autograd.Function):
    """exp, whose backward first calls ``look`` with a tensor that it saved beside its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result, seen)
        ctx.look = look
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        result, seen = ctx.saved_tensors
        ctx.look(seen)
        return grad * result, None, None
