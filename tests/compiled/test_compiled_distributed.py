"""Compiled layers under a policy, shared out by two processes: values, memory, and collectives."""

import pytest
import torch
from two_compiled import POLICIES, WAYS, Seen, seen_by_two

SEEN = list[dict[tuple[str, str, bool], Seen]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return seen_by_two(tmp_path_factory.mktemp("processes"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_compiled_layers_that_are_shared_out(seen, way, name):
    for of_rank in seen:
        found, eager, plain = of_rank[way, name, True], of_rank[way, name, False], of_rank[way, "none", True]
        torch.testing.assert_close(found.values, eager.values)
        torch.testing.assert_close(found.values, plain.values)
        assert 0.9 * eager.held_nbytes <= found.held_nbytes <= eager.held_nbytes
        assert found.held_nbytes < plain.held_nbytes
        assert len(found.collectives) == 2  # graphs, of all layers
        assert set(found.collectives) == set(plain.collectives)  # none runs again
        assert ("tensor" in way) == (sum(plain.collectives) > 0)
