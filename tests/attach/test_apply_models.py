"""The presets on tiny Hugging Face decoders: bitwise where they promise it, and what each drops to the byte."""

import copy
import inspect
import statistics
import warnings
from contextlib import nullcontext

import models
import pytest
import torch
import transformers
from models import HIDDEN, INTERMEDIATE, LAYERS, LAYERS_BY_KERNELS, LENGTH, SHAPE, VOCABULARY, held, image_batch, make
from tiers import by_default, slow
from tiny import assert_same, classes, of_one_more, train

import recompute
from recompute.errors import NoEffectError, PolicyWarning

TOKENS = models.BATCH * LENGTH
DECODERS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"]
TAPES = ["hook", "elementwise", "auto"]
EXACT = ["none", "full", "alternate", *TAPES]  # where there is no CUDA auto has no kernels
some_exact = pytest.mark.parametrize("preset", by_default(EXACT, "full", "hook"))
IDS = models.batch("llama")["input_ids"]


def steps(model, count=2, **arguments):
    return train(model, lambda: model(input_ids=IDS, labels=IDS, **arguments).loss, steps=count)


def gradients_of_batches(model, count):
    """The gradients of each of several batches, with the same weights."""
    found = []
    for seed in range(count):
        ids = torch.randint(3, VOCABULARY, IDS.shape, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def applied(model, policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        return recompute.apply(model, policy)


@pytest.fixture(scope="module")
def plain():
    """Two steps without a policy, by the model's name."""
    found = {}
    return lambda name: found.setdefault(name, steps(make(name)))


@pytest.mark.parametrize("preset", by_default(EXACT, "none", "full", "hook", "auto"))
@pytest.mark.parametrize("name", by_default([*DECODERS, "gpt2"], "gpt2"))
def test_losses_and_gradients_are_bitwise_those_without(name, preset, plain):
    model = make(name)
    before = classes(model)
    handle = applied(model, preset)
    assert_same(steps(model), plain(name))
    stats = handle.stats()
    does_something = preset != "none"
    assert (stats.dropped_nbytes > 0) is does_something
    assert (stats.kept_nbytes > 0) is (does_something and preset in TAPES)  # a checkpoint holds its inputs alone
    handle.remove()
    assert classes(model) == before


def in_float64(model):
    """The same weights with everything in float64, also the norms, which Hugging Face computes in float32."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):
            offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
            eps = getattr(module, "variance_epsilon", None) or module.eps

            def forward(x, weight=module.weight, offset=offset, eps=eps):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight)

            module.forward = forward
    return exact


def gradient_error(outcome, truth):
    """Root mean square over all gradients, each relative to its own size."""
    errors = [
        (one.double() - other).norm() / other.norm()
        for one, other in zip(outcome, truth, strict=True)
        if other.norm() > 0
    ]
    return torch.stack(errors).square().mean().sqrt().item()


@pytest.mark.parametrize("name", by_default(DECODERS, "gemma3"))
def test_kernels_are_as_close_to_float64_as_eager_is(name):
    model, eager = make(name), make(name)
    exact = in_float64(eager)
    applied(model, "kernel")
    (found,), (without,), (truth,) = steps(model, 1), steps(eager, 1), steps(exact, 1)
    assert 0 < gradient_error(without, truth) < 1e-5
    # Both sum the same terms, in another order: a few tens of gradients, each with rounding errors of its own.
    assert gradient_error(found, truth) <= 1.25 * gradient_error(without, truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_kernels_of_whole_layers_are_as_close_to_float64_as_eager_is(name):
    model, eager = make(name), make(name)
    exact = in_float64(eager)
    handle = applied(model, LAYERS_BY_KERNELS)
    found, without, truth = (gradients_of_batches(each, 8) for each in (model, eager, exact))
    assert 0 < gradient_error(without[0], truth[0]) < 1e-5
    # Of one batch the ratio differs by a quarter from processor to processor, as sums are in other orders: so of eight.
    ratios = [gradient_error(a, c) / gradient_error(b, c) for a, b, c in zip(found, without, truth, strict=True)]
    assert statistics.mean(ratios) <= 1.15
    notes = handle.explain(wide=True)
    for kernel in ("gated_mlp", "rms_norm", "linear_cross_entropy"):
        assert f"kernel: {kernel}" in notes


def test_kernels_leave_out_what_they_do_not_compute():
    with pytest.warns(
        PolicyWarning, match=r"rules\[0\]: no kernel replaces LlamaMLP, so hooks regenerate there"
    ) as caught:
        handle = recompute.apply(make("llama", hidden_act="relu"), "kernel")
    assert len(caught) == 1  # for all layers
    assert "kernel: rms_norm" in handle.explain(wide=True)
    assert "gated_mlp" not in handle.explain(wide=True)


def norm_nbytes(rows, width, size):
    """What a Llama-like norm's own ops and its consumers save, by storage, when the input lives anyway."""
    widened = 0 if size == 4 else rows * width * 4  # the input in float32; in float32 it is the input itself
    return widened + rows * 4 + 2 * rows * width * size  # rsqrt; the normalized values and the output


every_size = pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])


@every_size
def test_elementwise_drops_and_keeps_these_bytes_of_a_llama(dtype, size):
    model, without = make("llama", dtype), make("llama", dtype)
    handle = applied(model, "elementwise")
    assert_same(steps(model, 1), steps(without, 1))
    stats = of_one_more(lambda: steps(model, 1), handle)
    norms, mlp_nbytes = 2 * LAYERS + 1, 2 * TOKENS * INTERMEDIATE * size  # the activation's output and the product
    assert stats.dropped_nbytes == norms * norm_nbytes(TOKENS, HIDDEN, size) + LAYERS * mlp_nbytes
    heads, kv, head = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
    # The input, q, attention's output and the stream after it; k and v; gate and up. A logarithm a head; and cosine
    # and sine, which are the same for all sequences.
    a_token = (4 * HIDDEN + 2 * kv * head + 2 * INTERMEDIATE) * size + heads * 4
    last = TOKENS * HIDDEN * size  # the last norm's input
    assert stats.kept_nbytes == LAYERS * (TOKENS * a_token + 2 * LENGTH * head * size) + last
    assert stats.frames == LAYERS + 1


@pytest.mark.parametrize("preset", TAPES)
def test_what_a_tape_says_it_drops_is_no_longer_held(preset):
    model, without = make("llama"), make("llama")
    handle = applied(model, preset)

    def run(each):
        each(input_ids=IDS, labels=IDS, use_cache=False)

    assert held(without, lambda: run(without)) - held(model, lambda: run(model)) == handle.stats().dropped_nbytes


@some_exact
@pytest.mark.parametrize("name", ["llama", *slow("gemma3")])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_low_precision_is_bitwise_too(precision, name, preset):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, without = make(name, dtype), make(name, dtype)
    applied(model, preset)

    def autocast_steps(each):
        def loss():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                return each(input_ids=IDS, labels=IDS).loss

        return train(each, loss)

    assert_same(autocast_steps(model), autocast_steps(without))


@pytest.mark.parametrize("precision", [*slow("bfloat16"), "autocast"])
@pytest.mark.parametrize("name", ["llama", *slow("gemma3")])
def test_kernels_in_low_precision_lose_no_more_than_eager(name, precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, without = make(name, dtype), make(name, dtype)
    exact = in_float64(without)
    applied(model, "kernel")
    logits = []
    for each in (model, without, exact):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast" and each is not exact):
            logits.append(each(input_ids=IDS).logits.double())
    found, eager = ((logits[i] - logits[2]).norm() for i in (0, 1))
    assert 0 < found <= 1.25 * eager


@pytest.mark.parametrize("preset", by_default([*EXACT, "kernel"], "full", "hook", "kernel"))
@pytest.mark.parametrize("reentrant", [False, *slow(True)])
def test_hugging_faces_checkpointing_runs_inside_the_policy(reentrant, preset):
    model, without = make("llama"), make("llama")
    for each in (model, without):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    # The preset none governs nothing, and so has nothing to tell of.
    with nullcontext() if preset == "none" else pytest.warns(PolicyWarning, match="its own checkpointing"):
        handle = recompute.apply(model, preset)
    if preset == "kernel":
        torch.testing.assert_close(steps(model), steps(without))
        return
    assert_same(steps(model), steps(without))
    handle.remove()
    assert_same(steps(model), steps(without))


@some_exact
def test_a_cache_that_training_fills_is_filled_once(preset):
    model, without = make("llama"), make("llama")
    assert model.config.use_cache
    applied(model, preset)
    caches = []
    for each in (model, without):
        output = each(input_ids=IDS, labels=IDS)
        output.loss.backward()
        cache = output.past_key_values
        assert cache.get_seq_length() == LENGTH
        caches.append([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    assert_same(*caches)


@pytest.mark.parametrize("preset", by_default([*EXACT, "kernel"], "full", "hook", "kernel"))
def test_attentions_and_hidden_states_are_recorded(preset):
    model, without = make("llama"), make("llama")
    for each in (model, without):
        each.set_attn_implementation("eager")
    applied(model, preset)
    options = {"output_attentions": True, "output_hidden_states": True}
    found, expected = (each(input_ids=IDS, **options) for each in (model, without))
    assert len(found.hidden_states) == LAYERS + 1
    assert len(found.attentions) == LAYERS
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    torch.testing.assert_close(found.attentions, expected.attentions)


@some_exact
@pytest.mark.parametrize(
    "options", [{"attention_dropout": 0.2}, *slow({"mlp_bias": True, "attention_bias": True})], ids=str
)
def test_options_of_the_model(options, preset):
    model = make("llama", **options)
    applied(model, preset)
    assert_same(steps(model), steps(make("llama", **options)))


@pytest.mark.parametrize("policy", by_default({"parts": "kernel", "layers": LAYERS_BY_KERNELS}, "layers"))
def test_kernels_take_biases(policy):
    options = {"mlp_bias": True, "attention_bias": True}
    model = make("llama", **options)
    assert "gated_mlp" in applied(model, policy).explain(wide=True)
    torch.testing.assert_close(steps(model), steps(make("llama", **options)))


@pytest.mark.parametrize("preset", by_default([*EXACT, "kernel"], "full", "hook", "kernel"))
def test_generates_the_same(preset):
    model, without = make("llama").eval(), make("llama").eval()
    applied(model, preset)
    found, expected = (each.generate(IDS[:, :4], max_new_tokens=8, do_sample=False) for each in (model, without))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("preset", by_default(["full", *TAPES, "kernel"], "full", "kernel"))
def test_saves_and_loads_as_without(preset, tmp_path):
    model = make("llama")
    signature = inspect.signature(model.forward)
    names = [name for name, _ in model.named_parameters()]
    applied(model, preset)
    assert inspect.signature(model.forward) == signature  # by which the Trainer drops columns
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert [name for name, _ in loaded.named_parameters()] == names
    assert_same(steps(loaded), steps(make("llama")))


MAMBA = {"state_size": 4, "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
BART = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "ffn_dim", "attention_heads")}
SWIN = {"image_size": 24, "patch_size": 3, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
OTHERS = {
    "opt": ("OPTForCausalLM", "OPTConfig", SHAPE | {"ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", SHAPE | {"embedding_size": 8}),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "bart": ("BartForConditionalGeneration", "BartConfig", SHAPE | BART | {"d_model": HIDDEN}),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN),
}


@pytest.mark.parametrize("preset", [*slow("full"), "elementwise", *slow("alternate", "hook")])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "whisper", "t5", "convnet", "mixtral", *OTHERS])
def test_a_preset_does_something_to_each_architecture_and_changes_no_bit(name, preset):
    if name in OTHERS:
        model_class, config, options = OTHERS[name]
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config)(**options)).train()
        batch = (
            image_batch(torch.Generator().manual_seed(0), 2, 0) if name == "swin" else {"input_ids": IDS, "labels": IDS}
        )
    else:
        model, batch = make(name), models.batch(name)
    if (name, preset) == ("convnet", "hook"):
        with pytest.raises(NoEffectError):  # what batch norms hold are their inputs and a few statistics
            recompute.verify(model, batch, policy=preset)
        return
    found = recompute.verify(model, batch, policy=preset)
    assert found.bitwise
    share = found.dropped_nbytes / (found.dropped_nbytes + found.kept_nbytes)
    assert share == 1.0 if preset in ("full", "alternate") else share > (0.0 if name == "convnet" else 0.15)
