"""The search for the longest sequence that fits asks for what it needs, and answers what it saw fit."""

import sys

import pytest
import torch
from ablation_testing import LEAST, quiet, run
from hypothesis import given
from hypothesis import strategies as st

from recompute.ablation.ablation_config import LongestSequence
from recompute.ablation.subjects import experiment_of
from recompute.ablation.trials import Experiment, attempted, is_out_of_memory
from recompute.errors import AblationError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def asked(**changes):
    return LongestSequence(**{"budget": "1GiB", "start": 256, "multiple": 64, "most": 4096, **changes})


@given(limit=st.integers(0, 6000), start=st.integers(2, 4096), multiple=st.integers(1, 300), text=st.integers(1, 6000))
def test_it_is_the_longest_of_all_multiples(limit, start, multiple, text):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    most = min(4096, text)
    found = asked(start=start, multiple=multiple).longest(fits, text)
    assert found == max(length for length in range(0, most + 1, multiple) if length <= limit)
    assert len(tried) == len({*tried}) <= 2 * (most // multiple).bit_length() + 2
    assert all(0 < length <= most for length in tried)
    assert found == 0 or found in tried, "what is answered has been seen to fit"


def test_it_doubles_and_then_halves_the_range():
    tried = []
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
def test_an_error_is_of_memory_or_not(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_only_a_share_of_a_gpu_looks_at_it_and_the_cpu_has_neither(monkeypatch):
    looked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: looked.append(device) or (1, 1000))
    for budget, nbytes in (("2GiB", 2 << 30), (4096, 4096)):
        assert [asked(budget=budget).budget_nbytes(device) for device in (CPU, CUDA)] == [nbytes, nbytes]
    assert asked(budget="device").budget_nbytes(CUDA) is None
    assert looked == []
    assert asked(budget="80%").budget_nbytes(CUDA) == 800
    for budget, message in (("device", "expected a size such as '4GiB' on cpu"), ("80%", "capacity of the device")):
        with pytest.raises(AblationError, match=f"longest_sequence.budget: .*{message}"):
            asked(budget=budget).budget_nbytes(CPU)


SEARCHED = LEAST.model_copy(
    update={"steps": 1, "batch_size": 2, "longest_sequence": asked(budget="1MiB", start=64, multiple=16)}
)


@pytest.mark.slow
def test_each_policy_and_peer_has_its_longest_sequence_in_all_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    found = run(tmp_path, SEARCHED, policies=("none", "full"), peers=("liger",), sequence_lengths=(16, 32))
    rows = {(row.policy, row.sequence_length): row for row in found}
    none, full = (rows[policy, 16].longest_sequence or 0 for policy in ("none", "full"))
    assert 0 < none < full
    for policy, longest in (("none", none), ("full", full), ("liger", None)):
        assert {rows[policy, length].longest_sequence for length in (16, 32)} == {longest}
    assert "liger" in rows["liger", 16].error
    assert peak(none) <= 1 << 20 < peak(none + 16)


def peak(length):
    """The bytes of a whole step without a policy."""
    config = SEARCHED.model_copy(update={"sequence_lengths": (length,)})
    experiment = experiment_of(config.comparisons()[0], bytes(4096), CPU, quiet)
    found = experiment.step_peak("none")
    row = experiment.row("none")
    parts = row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.peak_bytes
    assert found == sum(each or 0 for each in parts)
    return found


def test_no_length_is_tried_that_the_text_is_too_short_for(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be" * 3)
    (row,) = run(tmp_path, SEARCHED, text=text, longest_sequence=asked(start=16, multiple=16))
    assert row.longest_sequence == 48


@pytest.mark.parametrize(
    ("failure", "longest", "error"),
    [("OutOfMemoryError: no room", 96, None), ("ValueError: a mistake", None, "ValueError: a mistake")],
)
def test_what_has_no_room_is_too_long_and_any_other_failure_is_the_rows(failure, longest, error, tmp_path, monkeypatch):
    def ask(self, task, policy):
        if task == "row":
            return self.row(policy), None
        return (None, failure) if self.batches[0]["input_ids"].shape[-1] > 100 else (1, None)

    monkeypatch.setattr(Experiment, "ask", ask)
    (row,) = run(tmp_path, SEARCHED)
    assert (row.longest_sequence, row.error) == (longest, error)


@pytest.mark.gpu
def test_a_row_finds_the_memory_that_a_failed_one_before_it_had():
    """Also such as torch does not allocate, as cuBLAS's handles."""

    def fails():
        held = torch.empty(1 << 28, device="cuda")
        raise torch.OutOfMemoryError(f"CUDA out of memory beside {held.nbytes} bytes")

    assert "OutOfMemoryError" in attempted(fails)[1]
    assert torch.cuda.memory_reserved() >= 1 << 28
    assert attempted(torch.cuda.memory_reserved)[0] < 1 << 28
