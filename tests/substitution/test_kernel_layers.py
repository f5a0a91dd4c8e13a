"""Kernels in the place of decoder layers, experts and heads of Hugging Face models: what runs, and what is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from models import BATCH, HIDDEN, INTERMEDIATE, LENGTH, SHAPE, VOCABULARY, held
from models import LAYERS_BY_KERNELS as POLICY
from tiers import by_default, slow
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

import recompute
from recompute.substitution.lazy_logits import LazyLogits

TOKENS = BATCH * LENGTH
LAYERS = 1  # the others are as the first
IDS = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def make(name: str = "Llama", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, "num_hidden_layers": LAYERS, **options})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def loss_of(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


class Ops(TorchDispatchMode):
    """Counts our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "recompute":
            self.counts[function._opname] += 1
        return function(*args, **(kwargs or {}))


def test_a_layer_holds_these_bytes_a_token() -> None:
    model = make()
    layers = {"type": "*DecoderLayer", "action": "recompute", "via": "kernel", "keep": "gemm"}  # some are thin here
    recompute.apply(model, {"rules": [layers, {"type": "*RMSNorm", "action": "recompute", "via": "kernel"}]})
    embeddings = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)

    def run() -> Tensor:
        return model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    run()
    heads, kv, head = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
    # The layer's input, q, attention's output and the stream after it; k and v; gate and up. A logarithm a head.
    layer = (4 * HIDDEN + 2 * kv * head + 2 * INTERMEDIATE) * 4 + heads * 4
    angles, last_norm = 2 * LENGTH * head * 4, HIDDEN * 4 + 4
    assert held(model, run) == LAYERS * TOKENS * layer + angles + TOKENS * last_norm


class Adapter(nn.Module):
    """Adds to what a Linear gives."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * x.mean(-1, keepdim=True)


def adapt(path: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, Adapter(layer.get_submodule(path)))

    return change


def hook(path: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.get_submodule(path).register_forward_hook(lambda module, args, output: output * 1.5)

    return change


def hook_backward(path: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.get_submodule(path).register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 1.5,))

    return change


class Mean(nn.LayerNorm):
    """Has the weight of an RMSNorm, and computes something else."""


def replace(path: str, make_one: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            setattr(layer, path, make_one(getattr(layer, path)))

    return change


def sequence(mlp: nn.Module) -> nn.Module:
    return nn.Sequential(mlp.gate_proj, nn.Tanh(), mlp.down_proj)


def without_gradients(path: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            linear = layer.get_submodule(path)
            linear.forward = torch.no_grad()(linear.forward)

    return change


def gelu(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


def set_to(path: str, name: str, value: Any) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            setattr(layer.get_submodule(path), name, value)

    return change


class Doubled(Tensor):
    """Doubles what a Linear gives of which it is the weight."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(Tensor) * 2 if function is F.linear else found


def doubled_by_its_weight(path: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            linear = layer.get_submodule(path)
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Doubled))

    return change


class Loud(LlamaMLP):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


CHANGES = {
    "another epsilon of the first norm": set_to("input_layernorm", "variance_epsilon", 0.5),
    "another epsilon of the second norm": set_to("post_attention_layernorm", "variance_epsilon", 0.5),
    "a weight of a class of its own": doubled_by_its_weight("mlp.gate_proj"),
    "an MLP that is called otherwise": set_to("mlp", "__class__", Loud),
    "an adapter on q": adapt("self_attn.q_proj"),
    "an adapter on down": adapt("mlp.down_proj"),
    "another activation": gelu,
    "another first norm": replace("input_layernorm", lambda _: Mean(HIDDEN)),
    "another second norm": replace("post_attention_layernorm", lambda _: Mean(HIDDEN)),
    "another MLP": replace("mlp", sequence),
    "q without gradients": without_gradients("self_attn.q_proj"),
    "v without gradients": without_gradients("self_attn.v_proj"),
    "a hook on the first norm": hook("input_layernorm"),
    "a hook on the second norm": hook("post_attention_layernorm"),
    "a hook on k": hook("self_attn.k_proj"),
    "a hook on the backward of q": hook_backward("self_attn.q_proj"),
    "a hook on the backward of attention's output": hook_backward("self_attn.o_proj"),
    "a hook on gate": hook("mlp.gate_proj"),
    "a hook on the MLP": hook("mlp"),
    "a hook on attention's output": hook("self_attn.o_proj"),
}


@pytest.mark.parametrize(
    "change",
    by_default(CHANGES, "another epsilon of the second norm", "an adapter on q", "a hook on the backward of q"),
)
def test_what_comes_after_the_policy_is_not_passed_over(change: Callable[[nn.Module], Any]) -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)
    gradients(model)
    for each in (model, plain):
        change(each)
    expected = gradients(plain)
    for _ in range(2):
        torch.testing.assert_close(gradients(model), expected)


def test_autocast_casts_as_it_does_without_a_policy() -> None:
    model, plain, exact = make(), make(), make().double()
    recompute.apply(model, POLICY)
    outcomes = []
    for each in (model, plain, exact):
        for _ in range(2):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=each is not exact), Ops() as ops:
                loss = loss_of(each)
            loss.backward()
        outcomes.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
        assert ops.counts["rms_norm_forward"] >= (2 * LAYERS + 1 if each is model else 0)
    found, without, truth = outcomes
    assert [value.dtype for value in found] == [value.dtype for value in without]

    def error(outcome: list[Tensor]) -> float:
        pairs = zip(outcome, truth, strict=True)
        return torch.stack([(one.double() - other).norm() / other.norm() for one, other in pairs]).mean().item()

    assert 1e-3 < error(found) <= 1.1 * error(without)


def test_frozen_weights_get_no_gradient_and_others_theirs() -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("mlp" in name or "k_proj" in name)
    for _ in range(2):
        torch.testing.assert_close(gradients(model), gradients(plain))


def test_training_makes_no_logits_and_evaluation_does() -> None:
    model = make()
    recompute.apply(model, POLICY)
    output = model(input_ids=IDS, labels=IDS)
    assert type(output.logits) is LazyLogits
    assert output.logits.is_lazy
    expected = make()(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits + 0, expected.logits)
    with torch.no_grad():
        output = model(input_ids=IDS, labels=IDS)
        assert output.logits.is_lazy
        torch.testing.assert_close(output.loss, expected.loss)
    with torch.inference_mode():
        assert type(model(input_ids=IDS, labels=IDS).logits) is Tensor
    assert type(model.eval()(input_ids=IDS, labels=IDS).logits) is Tensor


def test_without_logits_a_step_holds_less() -> None:
    vocabulary = 4096
    model, plain = (make(vocab_size=vocabulary) for _ in range(2))
    recompute.apply(model, POLICY)
    without = held(model, lambda: loss_of(model))
    assert held(plain, lambda: loss_of(plain)) - without > TOKENS * vocabulary * 4


@pytest.mark.parametrize("name", ["Llama", *slow("Cohere", "Granite", "Gemma2")])
def test_log_probabilities_and_entropies_of_ones_own_go_without_logits_too(name: str) -> None:
    def loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=IDS, use_cache=False).logits
        scores = F.log_softmax(logits[:, :-1] / 0.7, -1)
        entropy = -(scores.exp() * scores).sum(-1)
        assert type(logits) is Tensor or logits.is_lazy
        return (scores.gather(-1, IDS[:, 1:, None]).squeeze(-1) - 0.01 * entropy).mean()

    model, plain = make(name), make(name)
    recompute.apply(model, POLICY)
    found, expected = loss(model), loss(plain)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_loss_of_ones_own_goes_without_logits_too() -> None:
    def loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=IDS).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), IDS[:, 1:].reshape(-1))

    model, plain = make(), make()
    recompute.apply(model, POLICY)
    with Ops() as ops:
        found = loss(model)
    assert ops.counts["linear_cross_entropy_forward"] == 1
    torch.testing.assert_close(found, loss(plain))


def test_softcapped_logits_are_capped_in_the_loss() -> None:
    model, plain = (make("Gemma2", final_logit_softcapping=2.0) for _ in range(2))
    recompute.apply(model, POLICY)
    with Ops() as ops:
        loss_of(model)
    assert ops.counts["linear_cross_entropy_forward"] == 1
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.slow
def test_a_layer_compiles_with_kernels_in_its_place() -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN)
    positions = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    layer = torch.compile(model.model.layers[0], backend="aot_eager", fullgraph=True)
    expected = plain.model.layers[0](hidden, position_embeddings=positions)
    torch.testing.assert_close(layer(hidden, position_embeddings=positions), expected)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, *slow(True)])
def test_hugging_faces_checkpointing_runs_around_kernels(reentrant: bool) -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)
    for each in (model, plain):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    for _ in range(3):
        torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("name", by_default(["llama", "gpt2", "gemma2", "bert"], "llama"))
def test_layers_have_their_kernels_whether_hugging_faces_checkpointing_is_on_or_not(name: str) -> None:
    notes = []
    for is_on in (False, True):
        model = models.make(name)
        if is_on:
            model.gradient_checkpointing_enable()
        handle = recompute.apply(model, POLICY | {"rules": [{"type": "block", "action": "recompute", "via": "kernel"}]})
        notes.append([attachment.runner.note for attachment in handle._attachments])
    assert any("kernel: " in note for note in notes[0])
    assert notes[0] == notes[1]


def test_checkpointing_that_is_switched_leaves_layers_their_kernels() -> None:
    model, plain = make(), make()
    model.gradient_checkpointing_enable()
    recompute.apply(model, POLICY)
    model.gradient_checkpointing_disable()
    always = make()
    recompute.apply(always, POLICY)
    counts = []
    for each in (model, always):
        with Ops() as ops:
            found = gradients(each)
        counts.append(ops.counts)
        torch.testing.assert_close(found, gradients(plain))
    assert counts[0] == counts[1]


def test_a_checkpoint_of_ours_runs_around_kernels() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self) -> Tensor:
            return loss_of(self.inner)

    model, plain = Model(), Model()
    recompute.apply(model.inner, POLICY)
    recompute.recompute(policy={"version": 1, "name": "all", "rules": [{"type": "Model", "action": "checkpoint"}]})(
        Model
    )
    for _ in range(3):
        outcomes = []
        for each, run in ((model, model), (plain, lambda: loss_of(plain.inner))):
            each.zero_grad()
            loss = run()
            loss.backward()
            outcomes.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
        torch.testing.assert_close(*outcomes)


def test_generates_the_same_with_a_cache() -> None:
    model, plain = make().eval(), make().eval()
    recompute.apply(model, POLICY)
    found, expected = (each.generate(IDS[:, :4], max_new_tokens=4, do_sample=False) for each in (model, plain))
    assert torch.equal(found, expected)


def test_functional_transforms_see_the_plain_model() -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)

    def loss(parameters: dict[str, Tensor], each: nn.Module) -> Tensor:
        arguments = {"input_ids": IDS, "labels": IDS, "use_cache": False}
        return torch.func.functional_call(each, parameters, (), arguments).loss

    found, expected = (
        torch.func.grad(loss)({name: p.detach() for name, p in each.named_parameters()}, each)
        for each in (model, plain)
    )
    torch.testing.assert_close(found, expected)


def test_weights_that_are_swapped_in_for_a_call_are_the_ones_used() -> None:
    model, plain = make(), make()
    recompute.apply(model, POLICY)
    gradients(model)
    other = {name: p.detach() * 1.1 for name, p in plain.named_parameters()}
    arguments = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    for _ in range(2):
        found, expected = (torch.func.functional_call(each, other, (), arguments).loss for each in (model, plain))
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))
