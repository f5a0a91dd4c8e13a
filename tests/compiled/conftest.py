"""Every test of captured regions starts from a seed, and must leave no hook, no mode and no setting behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    from recompute.engine import recipes

    torch.manual_seed(0)
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert recipes.local.books == []
    assert recipes.local.active_frames == []
