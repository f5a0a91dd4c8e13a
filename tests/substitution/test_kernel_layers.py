"""Layers in which kernels are: alone they give what the model gives, on a tape and as captured code their own bits."""

import functools
import gc
import itertools

import models
import pytest
import torch
from corpus import counting
from engine_testing import module_of
from layer_testing import CHANGES, EVERYTHING, TAPES, WAYS, causal, gradients, outcome, policy, run_in
from models import BATCH, HIDDEN, INTERMEDIATE, LENGTH, SHAPE, held
from tiers import by_default, slow
from tiny import assert_same, counted_ops, decoder, rule, rules, token_ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

import recompute
from recompute.compiled.region_record import WARMUP_FRAMES
from recompute.engine.cut.frontier import frontier
from recompute.errors import PolicyWarning
from recompute.estimation.build_model import build, build_fake

TOKENS = BATCH * LENGTH
LAYERS = 1
"""Of each model: the others are as the first."""
BATCH_OF_IDS = models.batch("llama")


def make(name="llama", dtype=torch.float32, **options):
    if name in models.FAMILIES:
        return models.make(name, dtype, **{"num_hidden_layers": LAYERS, **options})
    torch.manual_seed(0)
    return causal(name, **{**SHAPE, "num_hidden_layers": LAYERS, **options})()


@functools.cache
def shared(way):
    return run_in(WAYS[way], make)[0]


def settled(way):
    """Shared by tests that change nothing about the model.

    What other tests change about the classes of its layers has it captured again.
    """
    model, counts = shared(way), []
    while way == "captured" and counts[-1:] != [LAYERS]:
        assert len(counts) <= WARMUP_FRAMES, f"layers that ran as captured code, by step: {counts}"
        with counting() as count:
            gradients(model, BATCH_OF_IDS)
        counts.append(count())
    return model


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe"]


@functools.cache
def of_the_kernels_alone(name, dtype):
    return gradients(run_in(WAYS["alone"], functools.partial(make, name, dtype))[0], models.batch(name))


@pytest.mark.parametrize("dtype", by_default(DTYPES, "bfloat16"))
@pytest.mark.parametrize("name", by_default(NAMES, "llama"))
@pytest.mark.parametrize("options", by_default(TAPES, "everything"))
def test_on_a_tape_gradients_are_those_of_the_kernels_alone(name, dtype, options):
    model = make(name, dtype)
    recompute.apply(model, policy(**options))
    for _ in range(3):  # in the first a plan is made, which the others follow
        assert_same(gradients(model, models.batch(name)), of_the_kernels_alone(name, dtype))


def adapters(model):
    """Train adapters of q and v alone."""
    model.requires_grad_(False)
    for name in ("an adapter on q", "an adapter on v"):
        CHANGES[name](model)


CAPTURED = {
    **{
        f"{name} in {dtype}": (functools.partial(make, name, DTYPES[dtype]), None, {}, {})
        for name, dtype in itertools.product(["llama", "qwen2", "qwen3", "phi3"], DTYPES)
    },
    **{f"on a tape: {name}": (make, None, options, {}) for name, options in TAPES.items() if name != "an op kept"},
    "layer norms": (functools.partial(make, "StableLm"), None, {}, {}),
    "dropout": (functools.partial(make, attention_dropout=0.25), None, {}, {}),
    "biases": (functools.partial(make, attention_bias=True, mlp_bias=True), None, {}, {}),
    "adapters": (make, adapters, {}, {}),
    "a hook": (make, CHANGES["a hook on k"], {}, {}),
    "autocast": (make, None, {}, {"autocast": True}),
    "autocast, on a tape": (make, None, TAPES["everything"], {"autocast": True}),
    "a cache": (make, None, {}, {"use_cache": True}),
}
"""A model, what is changed about it before, options of its rule, and options of a step."""


@pytest.mark.parametrize("case", by_default(CAPTURED, "llama in float32"))
def test_as_captured_code_a_layer_has_the_bits_bytes_and_statistics_that_it_had(case):
    build, change, options, step = case

    def changed():
        (change or bool)(model := build())
        return model

    (code, handle), (before, of_before) = (
        run_in({**options, **more}, changed, **step) for more in ({}, {"capture": False})
    )
    stats, stats_before = handle.stats(), of_before.stats()
    with counting() as count:
        assert_same(gradients(code, BATCH_OF_IDS, **step), gradients(before, BATCH_OF_IDS, **step))
    assert count() == LAYERS
    assert f"model.layers.*: {LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)
    found, expected = handle.stats() - stats, of_before.stats() - stats_before
    for name in ("frames", "eager_nbytes"):
        assert getattr(found, name) == getattr(expected, name) > 0, name
    # Where a rotation runs again with a norm, that norm's roots need not be held.
    assert found.kept_nbytes <= expected.kept_nbytes
    assert found.dropped_nbytes >= expected.dropped_nbytes
    assert handle.plans().keys() == of_before.plans().keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_layers_with_stacked_experts_are_captured_where_no_kernel_runs():
    code, plain = (make("mixtral", torch.bfloat16, output_router_logits=False) for _ in "ab")
    batch = models.batch("mixtral")
    recompute.apply(code, "auto")
    for _ in range(8):
        gradients(code, batch)
    with counting() as count:
        found = gradients(code, batch)
    assert count() == LAYERS + 1  # and the last norm
    assert_same(found, gradients(plain, batch))


def test_a_call_without_gradients_before_each_step_keeps_no_layer_from_being_captured():
    """As where reinforcement learning scores what the model has written."""
    model = make()
    handle = recompute.apply(model, policy())
    for _ in range(8):
        with torch.no_grad():
            model(**BATCH_OF_IDS)
        gradients(model, BATCH_OF_IDS)
    assert f"model.layers.*: {LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)


# What comes after the policy

SOME_CHANGES = {
    "llama": list(CHANGES),
    "Olmo": ["another first norm", "a hook on the second norm", "an adapter on down"],  # whose norms have no weights
}


@pytest.mark.parametrize("way", by_default(WAYS, "alone", "captured"))
@pytest.mark.parametrize(
    ("name", "change"),
    by_default([(name, each) for name, some in SOME_CHANGES.items() for each in some], ("llama", "an adapter on q")),
)
def test_what_comes_after_the_policy_is_not_passed_over(name, change, way):
    model, plain = run_in(way, functools.partial(make, name))[0], make(name)
    for each in (model, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    expected = gradients(plain, BATCH_OF_IDS)
    for _ in range(3):
        torch.testing.assert_close(gradients(model, BATCH_OF_IDS), expected)


# Surroundings


class _Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, **batch):
        ids = batch["input_ids"]
        embeddings = self.model.get_input_embeddings()(ids).requires_grad_()

        def run(embeddings):
            return self.model(inputs_embeds=embeddings, labels=ids, use_cache=False).loss

        return type("Output", (), {"loss": checkpoint(run, embeddings, use_reentrant=self.reentrant)})


def _expanded(model, batch):
    """The last layer gets a gradient of other strides than in the steps before."""
    model.zero_grad()
    model.model(batch["input_ids"], use_cache=False).last_hidden_state.mean().backward()
    return [parameter.grad for parameter in model.model.parameters() if parameter.grad is not None]


def _frozen(model, batch):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "k_proj" in name)
    found = gradients(model, batch)
    model.requires_grad_(True)
    assert len(found) == 1 + LAYERS * 4
    return found


def _without_gradients(model, batch):
    found = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found.append(model(**batch).logits)
    found.append(model.eval()(**batch).logits.detach())
    found.append(model.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False))
    model.train()
    return [each.clone() for each in found]


def _other_weights(model, batch):
    """Swapped in for a call, and differentiated by a transform."""
    weights = {name: parameter.detach() * 1.1 for name, parameter in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (), {**batch, "use_cache": False}).loss

    return [loss(weights), *torch.func.grad(loss)(weights).values()]


def _two_backwards(model, batch):
    parameters = list(model.parameters())
    loss = model(**batch, use_cache=False).loss
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert_same(first, second)
    return list(first)


def _gradients_of_gradients(model, batch):
    mlp = model.model.layers[-1].mlp  # behind all attention, whose gradient has none on the CPU
    weights = [mlp.up_proj.weight, mlp.down_proj.weight]
    first = torch.autograd.grad(model(**batch, use_cache=False).loss, weights, create_graph=True)
    return list(torch.autograd.grad(sum(each.square().sum() for each in first), weights))


SURROUNDINGS = {
    "autocast": lambda model, batch: gradients(model, batch, autocast=True),
    "a cache": lambda model, batch: gradients(model, batch, use_cache=True),
    "a checkpoint of torch's": lambda model, batch: gradients(_Checkpointed(model, False), batch),
    "a reentrant checkpoint of torch's": lambda model, batch: gradients(_Checkpointed(model, True), batch),
    "other lengths": lambda model, batch: gradients(model, {key: value[:, :-3] for key, value in batch.items()}),
    "another order of gradients": _expanded,
    "frozen weights": _frozen,
    "no gradients": _without_gradients,
    "other weights": _other_weights,
    "two backwards": _two_backwards,
    "gradients of gradients": _gradients_of_gradients,
}
SOME_SURROUNDINGS = ("other lengths", "frozen weights", "no gradients", "other weights", "two backwards")


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", by_default(list(SURROUNDINGS), *SOME_SURROUNDINGS))
def test_surroundings_give_what_they_give_without_a_policy_and_one_way_the_bits_of_another(name, way):
    surrounding, model = SURROUNDINGS[name], settled(way)
    expected = surrounding(make() if way == "alone" else settled("alone"), BATCH_OF_IDS)
    for _ in range(2):
        found = surrounding(model, BATCH_OF_IDS)
        if way == "alone" and name == "autocast":
            assert [each.dtype for each in found] == [each.dtype for each in expected]  # its errors are tested below
        elif way == "alone" or name == "gradients of gradients":
            torch.testing.assert_close(found, expected)
        else:
            assert_same(found, expected)
    if way == "captured" and name == "gradients of gradients":
        with pytest.warns(PolicyWarning, match="create_graph=True"):
            surrounding(run_in({}, make)[0], BATCH_OF_IDS)
    gradients(model, BATCH_OF_IDS)


def test_autocast_casts_as_it_does_without_a_policy():
    model, plain, exact = run_in(WAYS["alone"], make)[0], make(), make().double()
    found, without = (gradients(each, BATCH_OF_IDS, autocast=True) for each in (model, plain))
    truth = gradients(exact, BATCH_OF_IDS)
    assert [value.dtype for value in found] == [value.dtype for value in without]

    def error(outcome):
        pairs = zip(outcome, truth, strict=True)
        return torch.stack([(one.double() - other).norm() / other.norm() for one, other in pairs]).mean().item()

    assert 1e-3 < error(found) <= 1.1 * error(without)


@pytest.mark.parametrize("name", by_default(["llama", "gpt2", "gemma2", "bert"], "llama"))
def test_layers_have_their_kernels_whether_hugging_faces_checkpointing_is_on_off_or_switched(name):
    def noted(before, after):
        model = models.make(name)
        if before:
            model.gradient_checkpointing_enable()
        given = models.LAYERS_BY_KERNELS | {"rules": [{**policy()["rules"][0], "type": "block"}]}
        handle = recompute.apply(model, given)
        if before and not after:
            model.gradient_checkpointing_disable()
        with counted_ops() as ops:
            found = outcome(model, models.batch(name))
        ours = {op: count for op, count in ops.items() if op.startswith("recompute.") and "backward" not in op}
        return [attachment.runner.note for attachment in handle._attachments], ours, found

    (off, ops, found), (on, *_, checkpointed), (switched, ops_switched, _) = (
        noted(*each) for each in ((False, False), (True, True), (True, False))
    )
    assert any("kernel: " in note for note in off)
    assert off == on == switched
    assert ops == ops_switched
    torch.testing.assert_close(checkpointed, found)


def test_a_checkpoint_of_ours_runs_around_kernels():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, **batch):
            return self.inner(**batch)

    model, plain = Model(), make()
    recompute.apply(model.inner, policy())
    recompute.recompute(policy={"rules": [{"type": "Model", "action": "checkpoint"}]})(Model)
    for _ in range(3):
        torch.testing.assert_close(*(gradients(each, BATCH_OF_IDS) for each in (model, plain)))


# Memory

ROW, LSE = TOKENS * HIDDEN * 4, TOKENS * SHAPE["num_attention_heads"] * 4
ANGLES = 2 * LENGTH * SHAPE["head_dim"] * 4
SAVED = 4 * ROW + TOKENS * 4 * (2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] + 2 * INTERMEDIATE) + LSE
"""A layer's input, q, attention's output and the stream after it; k and v; gate and up; attention's logarithms."""


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        pytest.param({"rerun": "gemm"}, 2 * ROW + LSE, id="gemm"),  # its input, and what attention gives
        pytest.param(TAPES["everything"], ROW, id="everything", marks=pytest.mark.slow),
        # What the kernels save, but for roots a row, which are the norm's whose output is made again anyway.
        pytest.param({"price": 0}, SAVED, id="to the last byte"),
        pytest.param({"keep": "gemm"}, SAVED, id="GEMMs kept"),  # some are thin here
    ],
)
def test_a_layer_holds_these_bytes_and_goes_on_to_as_captured_code(options, layer):
    embeddings = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)

    def run(model):
        return model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    model, plain = make(), make()
    handle = recompute.apply(model, policy(**options))
    run(model).sum().backward()
    del plain.model.layers[:]
    last_norm = held(plain, lambda: run(plain))
    assert held(model, lambda: run(model)) == LAYERS * layer + ANGLES + last_norm
    assert {plan.kept_nbytes for plan in handle.plans().values()} == {layer + ANGLES}
    for _ in range(8):
        torch.autograd.backward(output := run(model), torch.ones_like(output))
    storages = {}
    with counting(storages) as count:
        output = run(model)
    assert count() == LAYERS
    alive = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert sum(nbytes for key, nbytes in storages.items() if key not in alive) == LAYERS * layer + ANGLES
    del output


@pytest.mark.parametrize("way", by_default(WAYS, "on a tape", "captured"))
def test_memory_is_freed_without_garbage_collection(way):
    model, _ = run_in(way, make)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            gradients(model, BATCH_OF_IDS)
            model(**BATCH_OF_IDS, use_cache=False)  # whose graph never runs backward
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert len(set(counts)) == 1


# What ``rerun``, ``keep`` and ``price`` say holds for what kernels run too


ROW, LSE = TOKENS * HIDDEN * 4, TOKENS * SHAPE["num_attention_heads"] * 4


def three_steps(name, given, **options):
    """In the first a plan is made, which the others follow."""
    model = models.make(name, **options)
    recompute.apply(model, given)
    return [gradients(model, models.batch(name)) for _ in range(3)]


def test_what_triton_ran_comes_back_from_triton(device):
    outcomes = []
    for options in ({}, {"rerun": EVERYTHING, "price": 0}):
        model = models.make("llama", num_hidden_layers=LAYERS).to(device)
        handle = recompute.apply(model, policy(**options))
        batch = {key: value.to(device) for key, value in models.batch("llama").items()}
        outcomes.append([gradients(model, batch) for _ in range(2)])
    assert_same(*outcomes)
    assert handle.plans()["model.layers.0"].dropped_nbytes > 0


def test_backward_runs_six_of_seven_gemms_again():
    counts = []
    for options in ({}, {"rerun": "gemm"}):
        model = models.make("llama", num_hidden_layers=LAYERS)
        recompute.apply(model, policy(**options))
        for _ in range(2):
            loss = model(**models.batch("llama"), use_cache=False).loss
            with counted_ops() as ops:
                loss.backward()
        counts.append((ops["aten.mm"] + ops["aten.addmm"], ops["recompute.rms_norm_backward"]))
    (alone, norms), (again, norms_again) = counts
    assert again - alone == 6 * LAYERS  # all but down, whose output nobody needs
    assert norms == norms_again == 2 * LAYERS  # q, k and v are one node with the norm


def test_the_frontier_is_the_same_on_fake_tensors(tmp_path):
    LlamaConfig(**{**SHAPE, "num_hidden_layers": LAYERS}).save_pretrained(tmp_path)
    given = {"sequence_length": LENGTH, "batch_size": BATCH, "dtype": torch.float32, "device": torch.device("cpu")}

    def frontiers(model, batch):
        handle = recompute.apply(model, policy(rerun=EVERYTHING))
        for _ in range(2):
            model(**batch)
        return [frontier(plan) for plan in handle.plans().values()]

    with build_fake(str(tmp_path), **given) as imaginary:
        found = frontiers(*imaginary)
    assert found == frontiers(*build(str(tmp_path), **given))
    assert [len(points) > 3 for points in found] == [True] * LAYERS


def test_explain_says_which_kernels_and_what_they_keep():
    model = models.make("llama", num_hidden_layers=LAYERS)
    handle = recompute.apply(model, policy(rerun="gemm", keep="recompute.glu_forward", price=2e10))
    gradients(model, models.batch("llama"))
    text = handle.explain(wide=True)
    assert "cheap ops run again and gemm, at 2e+10 bytes a second; recompute.glu_forward kept" in text
    assert "kernel: gated_mlp (silu)" in text
    assert "attention: the rule does not rerun it" in text


def test_where_kernels_do_not_run_the_tape_has_the_ops_of_the_model():
    outcomes = []
    for via in ("hook", "auto"):
        model = models.make("llama", num_hidden_layers=LAYERS)
        handle = recompute.apply(model, policy(via, rerun="gemm"))
        outcomes.append(gradients(model, models.batch("llama")))
        assert {plan.kept_nbytes for plan in handle.plans().values()} == {2 * ROW + LSE + ANGLES}
    assert_same(*outcomes)


def test_parts_are_on_tapes_of_their_own():
    given = rules(
        rule("*MLP", "recompute", via="kernel", rerun="gemm", price=0),
        rule("*Attention", "recompute", via="kernel", rerun="gemm", price=0),
    )
    model, alone = models.make("llama"), models.make("llama")
    handle = recompute.apply(model, given)
    recompute.apply(alone, rules(*({**each, "rerun": [], "price": 1e9} for each in given["rules"])))
    for _ in range(2):
        assert_same(gradients(model, models.batch("llama")), gradients(alone, models.batch("llama")))
    plans = handle.plans()
    assert plans["model.layers.0.mlp"].kept_nbytes == ROW
    assert plans["model.layers.0.self_attn"].kept_nbytes == 2 * ROW + LSE + ANGLES


def test_a_rule_around_layers_takes_their_kernels_onto_its_tape():
    around = rule("LlamaModel", "recompute", via="kernel")
    expected = three_steps("llama", rules(around))
    assert_same(three_steps("llama", rules({**around, "rerun": EVERYTHING, "price": 0})), expected)


def test_what_is_kept_by_name_is_not_made_again():
    reruns = {}
    for keep in ((), "attended"):
        model = decoder()
        for layer in model.layers:
            naming = lambda self, x: recompute.keep(self.attention(x), "attended")  # noqa: E731
            layer.self_attn = module_of(naming, attention=layer.self_attn)
        given = rule("TinyDecoderLayer", "recompute", via="kernel", rerun="gemm", keep=keep)
        handle = recompute.apply(model, rules(given))
        for _ in range(2):
            model(token_ids()).sum().backward()
        plan = handle.plans()["layers.0"]
        reruns[bool(keep)] = sum(plan.steps[index].name == "aten.mm" for index in plan.rerun)
        assert ("attended kept" in handle.explain(wide=True)) is bool(keep)
    assert reruns[False] == reruns[True] + 1  # attention's output projection


@pytest.mark.parametrize("name", ["llama", *slow("gemma2", "mixtral")])
def test_every_regenerated_tensor_is_the_dropped_one(name, monkeypatch):
    monkeypatch.setattr("recompute.engine.bit_comparison._verifying", True)
    three_steps(name, policy(rerun=EVERYTHING, price=0))


@pytest.mark.slow
def test_a_checkpoint_inside_runs_as_it_does():
    def checkpointed(self, x):
        return checkpoint(self.attention, x, use_reentrant=False)

    outcomes = []
    for options in ({}, {"rerun": "gemm"}):
        model = decoder()
        for layer in model.layers:
            layer.self_attn = module_of(checkpointed, attention=layer.self_attn)
        recompute.apply(model, rules(rule("TinyDecoderLayer", "recompute", via="kernel", **options)))
        for _ in range(2):
            model.zero_grad()
            model(token_ids()).sum().backward()
        outcomes.append([p.grad for p in model.parameters()])
    assert_same(*outcomes)
