"""Layouts: which tensors in one storage have no element in common."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from recompute.engine.cut.layout import Layout, are_apart


def places(tensor: Tensor) -> set[int]:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return {*torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()}


def is_known_to_be_apart(one: Tensor, other: Tensor) -> bool:
    return are_apart(Layout.of(one), Layout.of(other))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_slices_along_any_dimension_are_apart(dim: int, order: tuple[int, ...]) -> None:
    parts = torch.zeros(4, 6, 5).permute(order).split([1, 2, 1], dim) if order[dim] == 0 else None
    parts = parts or torch.zeros(4, 6, 5).permute(order).chunk(3, dim)
    for number, part in enumerate(parts):
        assert [is_known_to_be_apart(part, other) for other in parts] == [each != number for each in range(len(parts))]


def test_tensors_that_are_said_to_be_apart_have_no_element_in_common() -> None:
    generator = random.Random(0)
    for _ in range(1000):
        strides = [generator.randint(0, 6) for _ in range(2)]
        storage = torch.zeros(60)
        one, other = (
            storage.as_strided([generator.randint(1, 4) for _ in strides], strides, generator.randint(0, 20))
            for _ in range(2)
        )
        assert not (is_known_to_be_apart(one, other) and places(one) & places(other))
