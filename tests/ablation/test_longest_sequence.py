"""The search for the longest sequence that fits asks for what it needs, and answers what it saw fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.longest_sequence import LongestSequence, is_out_of_memory
from recompute.ablation.subjects import experiment_of
from recompute.errors import AblationError
from recompute.estimation.llama import ModelShape

CPU = torch.device("cpu")


def asked(**changes: Any) -> LongestSequence:
    return LongestSequence(**{"budget": "1GiB", "start": 256, "multiple": 64, "most": 4096, **changes})


@given(limit=st.integers(0, 6000), start=st.integers(2, 4096), multiple=st.integers(1, 300))
def test_it_is_the_longest_of_all_multiples(limit: int, start: int, multiple: int) -> None:
    tried: list[int] = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= limit

    found = asked(start=start, multiple=multiple).longest(fits, 10**6)
    lengths = range(0, 4096 + 1, multiple)
    assert found == max((length for length in lengths if length <= limit), default=0)
    assert len(tried) == len({*tried}) <= 2 * (4096 // multiple).bit_length() + 2
    assert all(0 < length <= 4096 for length in tried)
    assert found == 0 or found in tried, "what is answered has been seen to fit"


def test_it_doubles_and_then_halves_the_range() -> None:
    tried: list[int] = []
    asked().longest(lambda length: tried.append(length) or length <= 1100, 10**6)
    assert tried == [256, 512, 1024, 2048, 1536, 1280, 1152, 1088]


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("MemoryError: no room", True),
        ("HostMemoryError: a rule may offload 1 GiB", True),
        ("AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", True),
        ("ProcessEnded: signal SIGKILL", True),
        ("ProcessEnded: signal SIGSEGV", False),
        ("TimeoutError: it took longer than cell_timeout_seconds: 3", False),
        ("AblationError: the peer liger needs the package liger-kernel", False),
    ],
)
def test_an_error_is_of_memory_or_not(error: str, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_a_budget_is_bytes_and_on_the_cpu_nothing_else() -> None:
    assert asked(budget="2GiB").budget_nbytes(CPU) == 2 << 30
    assert asked(budget=4096).budget_nbytes(CPU) == 4096
    for budget, message in (("device", "expected a size such as '4GiB' on cpu"), ("80%", "capacity of the device")):
        with pytest.raises(AblationError, match=f"longest_sequence.budget: .*{message}"):
            asked(budget=budget).budget_nbytes(CPU)


def test_only_a_share_of_a_gpu_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: looked.append(device) or (1, 1000))
    cuda = torch.device("cuda")
    assert [asked(budget=budget).budget_nbytes(cuda) for budget in ("2GiB", 4096, "device")] == [2 << 30, 4096, None]
    assert looked == []
    assert asked(budget="80%").budget_nbytes(cuda) == 800


SHAPE = ModelShape(hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1)
CONFIG = AblationConfig(
    model=SHAPE, policies=("none", "full"), peers=("liger",), sequence_lengths=(16, 32), batch_size=2, steps=1,
    device="cpu", longest_sequence=asked(budget="1MiB", start=64, multiple=16),
)  # fmt: skip


@pytest.mark.slow
def test_each_policy_and_peer_has_its_longest_sequence_in_all_rows(tmp_path: Path) -> None:
    quiet: Any = {"progress": lambda *_: None, "command": "recompute ablate"}
    rows = {(row.policy, row.sequence_length): row for row in run_ablation.run(CONFIG, tmp_path, **quiet)}
    none, full = (rows[policy, 16].longest_sequence or 0 for policy in ("none", "full"))
    assert 0 < none < full
    for policy, longest in (("none", none), ("full", full), ("liger", None)):
        assert {rows[policy, length].longest_sequence for length in (16, 32)} == {longest}
    assert "liger" in (rows["liger", 16].error or "")
    assert peak(none) <= 1 << 20 < peak(none + 16)


def peak(length: int) -> int:
    """The bytes of a whole step without a policy."""
    config = CONFIG.model_copy(update={"sequence_lengths": (length,)})
    experiment = experiment_of(config.comparisons()[0], bytes(4096), CPU, lambda *_: None)
    found, error = experiment.step_peak("none")
    assert error is None
    row = experiment.row("none")
    static = (row.parameter_bytes or 0) + (row.gradient_bytes or 0) + (row.optimizer_bytes or 0)
    assert found == static + (row.peak_bytes or 0)
    return found or 0


def test_no_length_is_tried_that_the_text_is_too_short_for(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be" * 3)
    search = asked(start=16, multiple=16)
    config = CONFIG.model_copy(update={"text": text, "policies": (), "peers": (), "longest_sequence": search})
    quiet: Any = {"progress": lambda *_: None, "command": "recompute ablate"}
    *_, row = run_ablation.run(config, tmp_path, **quiet)
    assert row.longest_sequence == 48
