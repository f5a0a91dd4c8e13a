"""The clock moves, and the memory counters agree with tensors of known sizes to the byte."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from recompute import counters

CPU = torch.device("cpu")
each_device = pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str
)
"""On CUDA memory is given in blocks of 512 bytes, of which all sizes here are multiples."""
KIB = 1024


def kibibytes(count, device=CPU):
    return torch.empty(count * KIB, dtype=torch.uint8, device=device)


@each_device
def test_a_trace_counts_what_is_alive_at_each_mark_and_the_most_alive_at_once_also_since_the_mark_before(device):
    kibibytes(1, device)
    with counters.memory_trace(device) as trace:
        first = kibibytes(3, device)
        second = kibibytes(5, device)
        del second
        trace.mark("one")
        del first
        trace.mark("two")
        third = kibibytes(2, device)
        trace.mark("three")
        del third
        fourth = kibibytes(1, device)
        trace.mark("four")
        del fourth
    assert trace.held_nbytes == {"one": 3 * KIB, "two": 0, "three": 2 * KIB, "four": KIB}
    assert trace.span_peak_nbytes == {"one": 8 * KIB, "two": 3 * KIB, "three": 2 * KIB, "four": 2 * KIB}
    assert trace.peak_nbytes == 8 * KIB


def test_a_trace_starts_at_zero_whatever_was_there_before_and_whether_that_goes_meanwhile():
    before = [kibibytes(64)]
    for _ in range(2):
        with counters.memory_trace(CPU) as trace:
            inside = kibibytes(2)
            before.clear()
            trace.mark("end")
        assert trace.held_nbytes == {"end": 2 * KIB}
        assert trace.peak_nbytes == inside.nbytes
        del inside


def test_trace_of_a_failed_block_reports_nothing_and_the_next_one_works():
    failed = counters.memory_trace(CPU)

    def fail():
        with failed:
            kibibytes(1)
            failed.mark("before")
            raise ValueError("out of ideas")

    with pytest.raises(ValueError, match="out of ideas"):
        fail()
    assert (failed.held_nbytes, failed.span_peak_nbytes, failed.peak_nbytes) == ({}, {}, 0)
    with counters.memory_trace(CPU) as trace:
        kibibytes(1)
    assert trace.peak_nbytes == KIB


def test_step_memory_of_exp_is_its_output_then_its_gradient():
    x = torch.zeros(1000, requires_grad=True)
    x.grad = torch.zeros_like(x)
    memory = counters.step_memory(lambda: x.exp().sum(), CPU)
    # exp saves its output; the loss is one float. Backward adds the loss's gradient and then exp's, which is
    # summed into the existing x.grad; the gradient of sum is expanded and takes no memory.
    assert memory.activation_bytes_held == 4000 + 4
    assert memory.peak_bytes == 4000 + 4 + 4 + 4000


def test_step_memory_counts_a_gradient_only_where_there_was_none():
    weight = torch.ones(1000, requires_grad=True)
    x = torch.ones(1000)

    def forward():
        return (weight * x).sum()

    fresh = counters.step_memory(forward, CPU)
    assert fresh.activation_bytes_held == 4  # x and weight are alive anyway; the product is not saved
    again = counters.step_memory(forward, CPU)
    assert again == fresh
    assert torch.equal(weight.grad, 2 * x)


def test_wall_clock_is_monotonic_and_thread_clock_ignores_sleep():
    wall, thread = counters.wall_seconds(CPU), counters.thread_seconds()
    time.sleep(0.05)
    assert counters.wall_seconds(CPU) - wall >= 0.05
    assert counters.thread_seconds() - thread < 0.05


def test_a_clock_gives_each_span_its_seconds(monkeypatch):
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=iter([2.0, 2.5, 2.75]).__next__))
    with counters.Clock(CPU) as clock:
        clock.mark("slow")
        clock.mark("fast")
    assert list(clock.seconds.items()) == [("slow", 0.5), ("fast", 0.25)]


def test_machine_names_hardware_versions_and_date():
    machine = counters.describe_machine(CPU)
    assert machine["torch"] == torch.__version__
    assert machine["gpu"] is None
    assert machine["cpu"]
    assert isinstance(machine["cores"], int)
    assert machine["cores"] >= 1
    assert {"python", "transformers", "triton", "date"} <= machine.keys()


@pytest.mark.gpu
def test_tracing_prints_nothing():
    code = "import torch, recompute.counters as c\nwith c.memory_trace(torch.device('cpu')): pass"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr


@pytest.mark.gpu
def test_wall_clock_waits_for_the_device():
    device = torch.device("cuda")
    start = counters.wall_seconds(device)
    torch.cuda._sleep(int(1e8))  # about 50 ms of device cycles
    launched = time.perf_counter()
    assert counters.wall_seconds(device) - start > 2 * (launched - start)


@pytest.mark.gpu
def test_spans_on_cuda_have_seconds_of_their_own():
    with counters.Clock(torch.device("cuda")) as clock:
        torch.cuda._sleep(int(1e8))
        clock.mark("one")
        clock.mark("two")
    assert clock.seconds["one"] > 10 * clock.seconds["two"]
