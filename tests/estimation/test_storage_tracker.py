"""What lives is counted to the byte, and lives on fake tensors as on real ones."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import models
import pytest
import torch
from engine_testing import function_of
from tiers import slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import recompute
from recompute import counters
from recompute.engine.fake_mode import FakeMode
from recompute.estimation.attention_choice import Platform
from recompute.estimation.build_model import without_values
from recompute.estimation.fake_tensors import fake_batch, fake_copy
from recompute.estimation.module_tracker import unit_of
from recompute.estimation.optimizer_step import simulate_by_shape, simulate_optimizer
from recompute.estimation.simulation import Surroundings, run_step, simulate
from recompute.estimation.storage_tracker import StorageTrace
from recompute.estimation.workspaces import workspace_nbytes

CPU = torch.device("cpu")
FAKE_OR_REAL = pytest.mark.parametrize("mode", [FakeTensorMode, nullcontext])
KIB = 1024


def kibibytes(count):
    return torch.empty(count * KIB, dtype=torch.uint8)


@FAKE_OR_REAL
def test_counts_what_is_alive_at_each_mark_and_in_each_span(mode):
    with mode(), StorageTrace() as trace:
        first = kibibytes(3)
        trace.mark("one")
        second = kibibytes(5)
        del first
        trace.mark("two")
        third = kibibytes(7)
        del second, third
        trace.mark("three")
    assert trace.held_nbytes == {"one": 3 * KIB, "two": 5 * KIB, "three": 0}
    assert trace.span_peak_nbytes == {"one": 3 * KIB, "two": 8 * KIB, "three": 12 * KIB}
    assert trace.peak_nbytes == 12 * KIB


@FAKE_OR_REAL
def test_views_and_what_was_there_before_count_nothing(mode):
    with mode():
        before = kibibytes(64)
        with StorageTrace() as trace:
            view = before[1:].view(torch.int8)
            before.add_(1)
            trace.mark("views")
            copy = view.clone()
            part = copy[:10]
            del copy
            trace.mark("part")
            del before, part
    assert trace.held_nbytes == {"views": 0, "part": 64 * KIB - 1}


@FAKE_OR_REAL
def test_blocks_are_rounded_up(mode):
    with mode(), StorageTrace(512) as trace:
        _ = torch.empty(1), torch.empty(512, dtype=torch.uint8)
    assert trace.peak_nbytes == 1024


@FAKE_OR_REAL
def test_what_autograd_saves_lives_until_backward(mode):
    with mode(), StorageTrace() as trace:
        x = torch.empty(1000, requires_grad=True)
        y = x.exp().exp()
        trace.mark("forward")
        torch.autograd.backward(y.sum())
        trace.mark("backward")
        del y
        trace.mark("end")
    assert trace.held_nbytes == {"forward": 3 * 4000, "backward": 3 * 4000, "end": 2 * 4000}


@FAKE_OR_REAL
def test_a_failed_block_reports_nothing(mode):
    failed = StorageTrace()

    def fail():
        with failed:
            torch.empty(3)
            failed.mark("before")
            raise ValueError("out of ideas")

    with mode(), pytest.raises(ValueError, match="out of ideas"):
        fail()
    assert (failed.held_nbytes, failed.span_peak_nbytes, failed.peak_nbytes) == ({}, {}, 0)


def test_what_another_thread_frees_is_seen():
    with StorageTrace() as trace, ThreadPoolExecutor() as pool:
        held = [kibibytes(3), kibibytes(5)]
        pool.submit(held.pop).result()
        trace.mark("popped")
    assert trace.held_nbytes == {"popped": 3 * KIB}


def test_of_tensors_made_of_tensors_those_inside_count():
    made = TwoTensor(torch.ones(1000), torch.ones(1000))
    with StorageTrace() as trace:
        twice = made * 2
        trace.mark("both")
        del twice
    assert trace.held_nbytes == {"both": 2 * 4000}


def run(model, batch):
    output = model(**batch)
    return output.loss, output


def fake_step(model, batch, policy):
    with without_values("model"):
        fake, given = fake_copy(model, torch.float32), fake_batch(batch)
        recompute.apply(fake, policy)
        run_step(fake, lambda: run(fake, given), Surroundings(), backward=False)
        return simulate(fake, lambda: run(fake, given))


def real_step(model, batch, policy):
    """Held and peak of the second step, with no gradients before it."""
    with recompute.apply(model, policy):
        run(model, batch)[0].backward()
        model.zero_grad()
        gc.collect()
        memory = counters.step_memory(lambda: run(model, batch)[0], CPU)
        model.zero_grad()
    return memory.activation_bytes_held, memory.peak_bytes


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("policy", ["elementwise", *slow("none", "kernel", "full", "hook")])
@pytest.mark.parametrize("name", ["llama", *slow("gpt2", "qwen3", "bert", "gemma2")])
def test_a_step_on_fakes_holds_and_peaks_as_a_real_one(name, policy):
    model = models.make(name).train()
    ids = torch.zeros(2, 24, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    step = fake_step(model, batch, policy)
    held, peak = real_step(model, batch, policy)
    # Numbers that Python gives to ops, of 4 bytes in blocks of 64 or with none, are on no fake tensor.
    assert abs(sum(step.held.values()) - held) <= 64
    said = max(moment.peak_nbytes(lambda gradients: gradients) for moment in step.moments)
    present = torch.get_rng_state().nbytes if policy == "full" else 0  # which a second run puts back at its end
    assert -64 <= peak - said <= present + 64


def test_copies_leave_the_model_as_it_is_and_share_what_it_shares():
    model = models.make("llama").train().eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with FakeMode():
        copy = fake_copy(model, torch.bfloat16)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert copy.training
    assert not model.training
    assert {each.dtype for each in copy.parameters()} == {torch.bfloat16}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_gradients_are_told_apart_by_when_they_come():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with FakeMode():
        fake = fake_copy(model, torch.float32)
        x = torch.empty(2, 8)
        step = simulate(fake, lambda: ((output := fake(x)).sum(), output))
    moments = {moment.name: moment for moment in step.moments}
    assert max(moments["backward of 1"].alive) == 256
    assert max(moments["backward of 0"].alive) == 512
    assert [name for name in moments if name.startswith("forward")] == ["forward of 0", "forward of 1"]
    # Halved, as over two devices: the second layer's gradient, which is there at the peak, counts 128.
    last = moments["backward of 0"]
    assert last.peak_nbytes(lambda gradients: gradients) - last.peak_nbytes(lambda gradients: gradients // 2) == 128


@pytest.mark.parametrize(("path", "unit"), [("layers.3.mlp", "layers.3"), ("lm_head", "lm_head"), ("", "the loss")])
def test_units(path, unit):
    assert unit_of(path) == unit


SHAPES = [(1000, 100), (1000, 100), (128,)]


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({"foreach": True}, 2 * 2 * 100_096 + 512),  # a root for each parameter, all at once
        ({"foreach": False}, 3 * 2 * 100_096),  # a root, that divided, and what Python has of the one before
    ],
)
def test_an_optimizers_step(options, nbytes):
    shapes = [(shape, torch.bfloat16) for shape in SHAPES]
    make = partial(torch.optim.AdamW, **options)
    step = simulate_optimizer(make, shapes)
    assert step == simulate_by_shape(make, shapes)
    assert abs(step.peak_nbytes - nbytes) <= 1024  # numbers of 4 bytes


def test_cuda_backward_of_attention_sums_in_float32():
    """8B's: 64 MiB for the query's gradient, 0.5 for the rows, and the keys' and values' gradients for 32 heads."""
    q, k = torch.empty(1, 32, 4096, 128, dtype=torch.bfloat16), torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert workspace_nbytes(backward, (q, q, k, k), None) == 2**20 * (64 + 0.5 + 64)
    assert workspace_nbytes(backward, (q, q, q, q), None) == 2**20 * (64 + 0.5)
    assert workspace_nbytes(torch.ops.aten.mm.default, (q, k), None) == 0


def test_autograd_sums_gradients_in_place():
    """A weight that is read twice has two gradients at once, and never a third one for their sum."""

    summed = function_of(
        lambda weight: weight.sum(),
        lambda gradient: gradient.expand(1000, 1000) * 2 + torch.ones(1000, 1000),
        saves=lambda *_: (),
    )

    def peak(run):
        step = simulate(nn.Module(), lambda: (loss := run(weight), loss), Surroundings(Platform.of(None)))
        return max(nbytes for moment in step.moments for nbytes in moment.alive.values())

    weight_nbytes = 4 * 1000 * 1000
    with FakeMode():
        weight, x = nn.Parameter(torch.empty(1000, 1000)), torch.empty(10, 1000)
        once = peak(lambda weight: (x @ weight).sum())
        twice = peak(lambda weight: (x @ weight).sum() + (x @ weight.sin()).sum())
        user = peak(summed.apply)
    assert once < 1.1 * weight_nbytes
    assert 2 * weight_nbytes <= twice - weight_nbytes < 2.2 * weight_nbytes  # and the sine
    assert 3 * weight_nbytes <= user  # what a user adds makes a third one


def test_embeddings_sum_in_float32_where_there_are_many_tokens():
    backward = torch.ops.aten.embedding_dense_backward.default
    gradient = torch.empty(4096, 256, dtype=torch.bfloat16)
    few = workspace_nbytes(backward, (gradient[:3072], torch.empty(3072), 10_000), None)
    many = workspace_nbytes(backward, (gradient, torch.empty(4096), 10_000), None)
    assert (few, many) == (0, (409 + 4096) * 256 * 4 + 48 * 4096)


@FAKE_OR_REAL
def test_plain_checkpoints_of_torch_are_seen(mode):
    with mode(), StorageTrace() as trace:
        x = torch.empty(1000, requires_grad=True)
        y = checkpoint(lambda x: x.exp().sin().exp(), x, use_reentrant=False, preserve_rng_state=False)
        trace.mark("forward")
        del y
    assert trace.held_nbytes["forward"] == 2 * 4000
