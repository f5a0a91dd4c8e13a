"""Every test of the engine starts from a seed, and must leave no hook, no open scope and no patch behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from recompute.engine import recipes, saved_tensors

_MODULE_CALL, _MODULE_GETATTR = nn.Module.__call__, nn.Module.__getattr__  # what torch.fx patches while it traces


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    left = [*recipes.local.books, *recipes.local.active_frames]
    is_patched = nn.Module.__call__ is not _MODULE_CALL or nn.Module.__getattr__ is not _MODULE_GETATTR
    recipes.local.books.clear()  # so that one test's failure is one failure
    recipes.local.active_frames.clear()
    nn.Module.__call__, nn.Module.__getattr__ = _MODULE_CALL, _MODULE_GETATTR  # type: ignore[method-assign]
    assert left == []
    assert not is_patched
    assert saved_tensors.top_hooks() is None
