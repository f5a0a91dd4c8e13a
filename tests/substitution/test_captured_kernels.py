"""Decoder layers that kernels compute, once they run as captured code: the same bits, bytes and statistics."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import torch
import transformers
from capture_kernels_testing import CHANGES, captured, gradients, policy, runs_code
from models import BATCH, HIDDEN, LAYERS, LENGTH, held
from tiers import by_default, slow
from tiny import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.attach.runners import region_in
from recompute.compiled.captured_region import WARMUP_FRAMES
from recompute.errors import PolicyWarning
from recompute.kernels.launch_plan import PlannedCall


def twins(name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model whose layers are captured, and one that goes on by its kernels."""
    code, kernels = models.make(name, dtype), models.make(name, dtype)
    recompute.apply(kernels, policy(capture=False))
    captured(code, models.batch(name), recompute.apply(code, policy()))
    for _ in range(3):  # learns which Linears read the first norm
        gradients(kernels, models.batch(name))
    return code, kernels


shared_twins = functools.cache(twins)


def settled(name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Twins that are shared by tests that change nothing about them.

    What other tests change about the classes of their layers has them captured again.
    """
    code, kernels = shared_twins(name, dtype)
    counts = []
    while counts[-1:] != [LAYERS]:
        assert len(counts) <= WARMUP_FRAMES, f"layers that ran as captured code, by step: {counts}"
        with runs_code() as count:
            gradients(code, models.batch(name))
        counts.append(count())
    return code, kernels


@pytest.mark.parametrize("dtype", by_default({"float32": torch.float32, "bfloat16": torch.bfloat16}, "float32"))
@pytest.mark.parametrize("name", by_default(["llama", "qwen2", "qwen3", "phi3"], "llama"))
def test_gradients_are_those_of_the_kernels_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    code, kernels = settled(name, dtype)
    batch = models.batch(name)
    with runs_code() as count:
        found = gradients(code, batch)
    assert count() == LAYERS
    assert_same(found, gradients(kernels, batch))


@pytest.mark.slow
def test_layers_are_captured_anew_under_each_setting_of_torch() -> None:
    model = models.make("llama")
    batch = models.batch("llama")
    handle = recompute.apply(model, policy())
    before = torch.get_float32_matmul_precision()
    try:
        for deterministic, precision in itertools.product((False, True), ("highest", "high")):
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(precision)
            captured(model, batch, handle)
            with runs_code() as count:
                gradients(model, batch)
            assert count() == LAYERS
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


@pytest.mark.slow
def test_layers_with_layer_norms_are_captured_with_the_kernels_bits() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.StableLmConfig(**models.SHAPE)
        return transformers.AutoModelForCausalLM.from_config(config).train()

    code, kernels, batch = make(), make(), models.batch("llama")
    handle = recompute.apply(code, policy())
    captured(code, batch, handle)
    assert "kernel: layer_norm" in handle.explain(wide=True)
    recompute.apply(kernels, policy(capture=False))
    assert_same(gradients(code, batch), gradients(kernels, batch))


def adapters(model: nn.Module) -> None:
    """Train adapters of q and v alone."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in ("an adapter on q", "an adapter on v"):
        CHANGES[name](model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options"),
    [
        pytest.param(None, {"attention_dropout": 0.25}, id="dropout"),
        pytest.param(None, {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param(adapters, {}, id="adapters"),
        pytest.param(CHANGES["a hook on k"], {}, id="a hook on k"),
    ],
)
def test_other_layers_are_captured_with_the_kernels_bits(change: Any, options: dict[str, Any]) -> None:
    code, kernels = models.make("llama", **options), models.make("llama", **options)
    for each in (code, kernels) if change is not None else ():
        change(each)
    batch = models.batch("llama")
    captured(code, batch, recompute.apply(code, policy()))
    recompute.apply(kernels, policy(capture=False))
    for _ in range(2):
        expected = gradients(kernels, batch)
    assert_same(gradients(code, batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["autocast", *slow("use_cache")])
def test_layers_are_captured_under_autocast_and_with_a_cache(option: str) -> None:
    code, kernels, batch = models.make("llama"), models.make("llama"), models.batch("llama")
    recompute.apply(kernels, policy(capture=False))
    captured(code, batch, recompute.apply(code, policy()), **{option: True})
    for _ in range(2):
        expected = gradients(kernels, batch, **{option: True})
    with runs_code() as count:
        found = gradients(code, batch, **{option: True})
    assert count() == LAYERS
    assert_same(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_layers_with_stacked_experts_are_captured_where_no_kernel_runs() -> None:
    options = {"dtype": torch.bfloat16, "output_router_logits": False, "num_hidden_layers": 1}
    code, plain = (models.make("mixtral", **options) for _ in "ab")
    batch = models.batch("mixtral")
    captured(code, batch, recompute.apply(code, "auto"))
    with runs_code() as count:
        found = gradients(code, batch)
    assert count() == 1 + 1  # and the last norm
    for _ in range(2):
        expected = gradients(plain, batch)
    assert_same(found, expected)


@pytest.mark.slow
def test_captured_code_launches_what_the_kernels_launch(device: str) -> None:
    code, kernels = (models.make("llama", num_hidden_layers=1).to(device) for _ in range(2))
    batch = {key: value.to(device) for key, value in models.batch("llama").items()}
    recompute.apply(kernels, policy(capture=False))
    handle = recompute.apply(code, policy())
    captured(code, batch, handle)
    assert_same(gradients(code, batch), [gradients(kernels, batch) for _ in range(2)][-1])
    region: Any = region_in(handle._attachments[0].runner)
    program = region._graphs()[0].program(region)
    names = [*vars(program)["forward"].__globals__.values(), *vars(program)["backward"].__globals__.values()]
    calls = [value for value in names if isinstance(value, PlannedCall)]
    assert len(calls) == 4 + 4
    assert all(call.is_planned for call in calls) == (device != "cpu" or _interprets())


def _interprets() -> bool:
    """Whether Triton's interpreter stands in for CUDA here."""
    from recompute.kernels import launch

    return launch.uses_triton(torch.empty(1))


def test_a_layer_holds_what_it_held_before() -> None:
    model = models.make("llama")
    handle = recompute.apply(model, policy())
    embeddings = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)

    def run() -> Tensor:
        return model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    run().sum().backward()
    plain = models.make("llama")
    del plain.model.layers[:]
    last_norm = held(plain, lambda: plain.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state)
    before = held(model, run) - last_norm
    for _ in range(8):
        torch.autograd.backward(output := run(), torch.ones_like(output))
    assert all(_regions(handle))
    storages: dict[int, int] = {}
    with runs_code(storages) as count:
        output = run()
    assert count() == LAYERS
    alive = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert sum(nbytes for address, nbytes in storages.items() if address not in alive) == before


def _regions(handle: recompute.attach.apply.AppliedPolicy) -> list[bool]:
    regions = [region_in(each.runner) for each in handle._attachments]
    return [region.is_captured for region in regions if region is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(["llama", "qwen3"], "llama"))
def test_a_step_counts_what_it_counted_before(name: str) -> None:
    model, batch = models.make(name), models.batch(name)
    handle = recompute.apply(model, policy())
    steps = []
    for _ in range(9):
        before = handle.stats()
        gradients(model, batch)
        steps.append(handle.stats() - before)
    assert all(_regions(handle))
    assert steps[-1].frames > 0
    if name == "qwen3":  # whose rotation runs again, and with it a norm, whose roots need not be held then
        assert steps[-1].kept_nbytes == steps[1].kept_nbytes
        assert steps[-1].dropped_nbytes >= steps[1].dropped_nbytes > 0
        return
    assert steps[-1] == steps[1]
    # In the two steps that are looked at, what comes back is not counted.
    held = [(step.frames, step.eager_nbytes, step.kept_nbytes, step.dropped_nbytes) for step in steps[1:]]
    assert set(held) == {held[0]}


TAPED: dict[str, dict[str, Any]] = {
    "gemm": {"rerun": "gemm"},
    "everything": {"rerun": ["gemm", "convolution", "attention"], "price": 0},
    "nothing": {"price": 1e18},
    "a limit": {"rerun": ["gemm", "convolution", "attention"], "hold": "96KiB"},
    "a kernel kept": {"rerun": "gemm", "keep": "recompute.glu_forward"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", TAPED.values(), ids=TAPED)
def test_kernels_on_a_tape_are_captured_as_well(options: dict[str, Any]) -> None:
    batch = models.batch("llama")
    code, tape = models.make("llama"), models.make("llama")
    handle, of_tape = recompute.apply(code, policy(**options)), recompute.apply(tape, policy(**options, capture=False))
    captured(code, batch, handle)
    for _ in range(4):
        gradients(tape, batch)
    before, before_of_tape = handle.stats(), of_tape.stats()
    with runs_code() as count:
        assert_same(gradients(code, batch), gradients(tape, batch))
    assert count() == LAYERS
    found, expected = handle.stats() - before, of_tape.stats() - before_of_tape
    for name in ("frames", "eager_nbytes", "kept_nbytes", "dropped_tensors", "dropped_nbytes"):
        assert getattr(found, name) == getattr(expected, name), name
    assert {path: plan.kept_nbytes for path, plan in handle.plans().items()} == {
        path: plan.kept_nbytes for path, plan in of_tape.plans().items()
    }


@pytest.mark.slow
def test_explain_says_which_layers_are_captured() -> None:
    model = models.make("llama")
    handle = recompute.apply(model, policy())
    captured(model, models.batch("llama"), handle)
    assert f"model.layers.*: {LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)


def test_a_call_without_gradients_before_each_step_keeps_no_layer_from_being_captured() -> None:
    """As where reinforcement learning scores what the model has written."""
    model, batch = models.make("llama"), models.batch("llama")
    handle = recompute.apply(model, policy())
    for _ in range(8):
        with torch.no_grad():
            model(**batch)
        gradients(model, batch)
    assert f"model.layers.*: {LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)


def test_capture_false_leaves_a_layer_to_its_kernels() -> None:
    model = models.make("llama")
    recompute.apply(model, policy(capture=False))
    with runs_code() as count:
        for _ in range(8):
            gradients(model, models.batch("llama"))
    assert count() == 0


@pytest.mark.parametrize("change", by_default(CHANGES, "an adapter on q"))
def test_what_changes_after_the_capture_is_not_passed_over(change: Callable[[nn.Module], Any]) -> None:
    code, plain, batch = models.make("llama"), models.make("llama"), models.batch("llama")
    captured(code, batch, recompute.apply(code, policy()))
    for each in (code, plain):
        change(each)
    expected = gradients(plain, batch)
    for _ in range(3):
        torch.testing.assert_close(gradients(code, batch), expected)


SURROUNDINGS: dict[str, Callable[[nn.Module, Mapping[str, Tensor]], list[Tensor]]] = {
    "autocast": lambda model, batch: gradients(model, batch, autocast=True),
    "a checkpoint of torch's": lambda model, batch: gradients(_Checkpointed(model), batch),
    "other lengths": lambda model, batch: gradients(model, {key: value[:, :-3] for key, value in batch.items()}),
    "another order of gradients": lambda model, batch: _expanded(model, batch),
}


class _Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return checkpoint(self.model, **batch, use_reentrant=False)


def _expanded(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The last layer gets a gradient of other strides than in the steps before."""
    model.zero_grad()
    model.model(batch["input_ids"], use_cache=False).last_hidden_state.sum().backward()
    return [parameter.grad for parameter in model.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("surrounding", by_default(SURROUNDINGS, "other lengths"))
def test_other_surroundings_give_the_bits_of_the_kernels(
    surrounding: Callable[[nn.Module, Mapping[str, Tensor]], list[Tensor]],
) -> None:
    code, kernels = settled()
    batch = models.batch("llama")
    for _ in range(2):
        assert_same(surrounding(code, batch), surrounding(kernels, batch))
    assert_same(gradients(code, batch), gradients(kernels, batch))


def test_evaluation_and_transforms_see_the_kernels_and_the_plain_model() -> None:
    code, kernels = settled()
    batch = models.batch("llama")
    with torch.no_grad():
        assert_same([code(**batch).loss], [kernels(**batch).loss])
    assert_same([code.eval()(**batch).loss], [kernels.eval()(**batch).loss])
    other = {name: parameter.detach() * 1.1 for name, parameter in code.named_parameters()}
    arguments = {**batch, "use_cache": False}
    found, expected = (torch.func.functional_call(each.train(), other, (), arguments).loss for each in (code, kernels))
    assert_same([found], [expected])


def test_a_second_backward_gives_the_same_bits() -> None:
    (code, _), batch = settled(), models.batch("llama")
    loss = code(**batch, use_cache=False).loss
    parameters = [parameter for parameter in code.parameters() if parameter.requires_grad]
    with runs_code() as count:
        loss = code(**batch, use_cache=False).loss
    assert count() == LAYERS
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert_same(list(torch.autograd.grad(loss, parameters)), list(first))


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_the_kernels() -> None:
    code, kernels = twins()
    batch = models.batch("llama")

    def twice(model: nn.Module) -> list[Tensor]:
        mlp = model.model.layers[-1].mlp  # behind all attention, whose gradient has none on the CPU
        weights = [mlp.up_proj.weight, mlp.down_proj.weight]
        loss = model(**batch, use_cache=False).loss
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), weights))

    expected = twice(kernels)
    with pytest.warns(PolicyWarning, match="differentiated in their turn"):
        torch.testing.assert_close(twice(code), expected)


def test_memory_is_freed_without_garbage_collection() -> None:
    (code, _), batch = settled(), models.batch("llama")
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            gradients(code, batch)
            counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert len(set(counts)) == 1
