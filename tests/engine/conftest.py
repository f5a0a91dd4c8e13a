"""Every test of the engine starts from a seed, and must leave no hook and no open scope on its thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recompute.engine import recipe, region


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    left = [*recipe.local.books, *region._local.spans]
    recipe.local.books.clear()  # so that one test's failure is one failure
    region._local.spans.clear()
    assert left == []
    assert recipe.top_hooks() is None
