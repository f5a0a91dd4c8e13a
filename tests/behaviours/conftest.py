"""Every test of a behaviour starts from a seed, and must leave no hook and no mode behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@pytest.fixture(autouse=True, scope="module")
def unfrozen() -> Iterator[None]:
    """What ``collector_off`` put out of the garbage collector's sight is in it again."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from two_processes import TwoProcesses

    processes = TwoProcesses(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.close()
