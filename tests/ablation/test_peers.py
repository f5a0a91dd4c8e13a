"""What other libraries offer: each peer trains, says what it lacks, and leaves the libraries as they were."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
from recompute.estimation.llama import ModelShape

REGIONS = [f"region {number}" for number in range(8)]  # q, k, v, attention, o, gate, up, down


class Remat(SimpleNamespace):
    """Stands for the package: it notes the regions, and runs all of them again."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def checkpoint(self) -> Any:
        return lambda function: partial(checkpoint, function, use_reentrant=False)

    def region(self, function: Any, name: str, *, recompute: bool) -> Any:
        assert not recompute
        self.names.append(name)
        return function

    def recompute_needs_tensor(self, output: Any) -> None:
        assert output.requires_grad


@pytest.mark.parametrize("is_installed", [False, True])
def test_torch_remat_saves_linears_and_attention_or_nothing(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Remat()
    if is_installed:
        pytest.importorskip("torch_remat")
    else:
        monkeypatch.setitem(sys.modules, "torch_remat", stand_in)
    attention = F.scaled_dot_product_attention
    config = AblationConfig(
        model=ModelShape(hidden_size=64, intermediate_size=172, layers=2, heads=4, kv_heads=2),
        policies=(), peers=("torch-remat", "torch-remat-full"), sequence_lengths=(64,), steps=2, device="cpu",
    )  # fmt: skip
    rows = run_ablation.run(config, tmp_path, command="recompute ablate", progress=lambda *_: None)
    none, saving, full = {row.policy: row for row in rows}.values()
    for row in (saving, full):
        assert row.error is None
        assert row.losses == none.losses
        assert row.exact
        assert row.grads_match
        assert (row.peak_bytes or 0) < (none.peak_bytes or 0)
    assert F.scaled_dot_product_attention is attention
    if is_installed:
        assert (full.activation_bytes_held or 0) < (saving.activation_bytes_held or 0)
    else:
        assert stand_in.names[:16] == 2 * REGIONS, "each run of a layer begins anew"
        assert {*stand_in.names} == {*REGIONS}
