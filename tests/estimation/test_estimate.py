"""Estimates of models whose steps were measured, and of what can be counted by hand."""

import functools
import json
from itertools import product

import models
import pytest
import torch
import transformers
from engine_testing import module_of
from tiers import by_default, slow
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.engine.fake_mode import FakeMode
from recompute.errors import EstimateError, ModelError
from recompute.estimation import cuda_semantics, model_estimator

GIB = 2**30
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, HEADS, KV_WIDTH, LENGTH = 4096, 14336, 32, 128256, 32, 1024, 4096
COUNT = 8_030_261_248
CLOSED_FORM = 16 * HIDDEN + 4 * HIDDEN + 4 * KV_WIDTH + 4 * HEADS + 8 * INTERMEDIATE
"""Bytes a token that a layer holds: norms; queries and attention; keys and values; its logsumexp; the MLP."""
ROOTS = 2 * 4
"""Bytes a token of the norms' reciprocal roots, which the closed form leaves out."""

FLASH = 2 * 512
"""Two blocks of the allocator's, for the random state of flash attention."""


def llama_8b(**changes):
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 8,
    }
    return transformers.LlamaConfig(**{**shape, **changes})


def estimate(model=None, **options):
    return recompute.estimate(llama_8b() if model is None else model, **{"advise": False, **options})


def tiny(**changes):
    return transformers.LlamaConfig(**{**models.SHAPE, **changes})


@pytest.fixture(scope="module")
def plain():
    return estimate()


def test_llama_8b_is_what_was_measured_without_a_policy(plain):
    """On an H200, pure bfloat16: 71.5 GiB after forward, 75.45 at the peak, in backward."""
    assert plain.peak_bytes / GIB == pytest.approx(75.45, rel=0.002)
    assert plain.peak_moment == "backward of the loss"
    static = plain.static_bytes
    assert (static.parameters, static.gradients, static.optimizer) == (2 * COUNT, 2 * COUNT, 4 * COUNT)
    after_forward = static.in_phase("forward") + plain.activation_bytes
    assert after_forward / GIB == pytest.approx(71.5, rel=0.002)
    assert sum(plain.parts.values()) == plain.peak_bytes
    assert plain.dominates == "optimizer states"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "peak", "moment"),
    [
        ("adamw", 74.85, "optimizer step"),
        *slow(("adamw-loop", 61.85, "optimizer step"), ("adamw-fused", 60.0, "backward of model.embed_tokens")),
    ],
)
def test_llama_8b_is_what_was_measured_with_every_layer_checkpointed(optimizer, peak, moment):
    found = estimate(policy="full", optimizer=optimizer)
    assert found.peak_bytes / GIB == pytest.approx(peak, rel=0.002)
    assert found.peak_moment == moment
    backward = max(nbytes for name, nbytes in found.moments.items() if name.startswith("backward"))
    assert backward / GIB == pytest.approx(60.0, rel=0.002)


@pytest.mark.slow
def test_a_layer_holds_the_closed_form_and_linearly_so(plain):
    assert CLOSED_FORM * LENGTH == 784.5 * 2**20
    assert plain.activation_bytes_per_layer == (CLOSED_FORM + ROOTS) * LENGTH + FLASH
    for batch_size, length in ((1, 2048), (1, 8192), (2, 4096)):
        found = estimate(llama_8b(num_hidden_layers=2), batch_size=batch_size, seq_len=length)
        assert found.activation_bytes_per_layer == (CLOSED_FORM + ROOTS) * batch_size * length + FLASH
        assert found.settings.batch.startswith(f"input_ids {batch_size}x{length}")


def test_logits_take_fourteen_bytes_a_token_and_class(plain):
    assert plain.logits_peak_bytes == 14 * LENGTH * VOCABULARY
    chunked = estimate(loss="chunked")
    assert chunked.logits_peak_bytes < 0.02 * plain.logits_peak_bytes
    saved = plain.activation_bytes - chunked.activation_bytes
    # log_softmax's output, less the memory of the head's gradient, which holds logits until then.
    assert saved == pytest.approx(4 * LENGTH * VOCABULARY - 2 * HIDDEN * VOCABULARY, rel=0.1)


@pytest.mark.parametrize(("policy", "held"), [("auto", 90_244), *slow(("elementwise", 94_344), ("kernel", 94_344))])
def test_policies_hold_what_they_say(policy, held):
    """Of a layer: GEMMs' outputs, attention's, and the stream; kernels as on CUDA, and not by their references."""
    found = estimate(llama_8b(num_hidden_layers=3), policy=policy)
    assert found.settings.policy == policy
    assert found.activation_bytes_per_layer == pytest.approx(held * LENGTH, rel=0.05)


@pytest.mark.slow
def test_advice_is_what_an_estimate_with_it_says():
    plain = recompute.estimate(llama_8b())
    assert "policy full and a fused optimizer" in str(plain)
    saves = {each.what: each.saves_nbytes for each in plain.advice}
    assert list(saves.values()) == sorted(saves.values(), reverse=True)
    assert saves["policy full"] == plain.peak_bytes - estimate(policy="full").peak_bytes
    fused = estimate(policy="full", optimizer="adamw-fused")
    assert saves["policy full and a fused optimizer"] == plain.peak_bytes - fused.peak_bytes
    for what, saved in saves.items():
        assert saved >= 0.001 * plain.peak_bytes
        if what.endswith(" and a fused optimizer"):
            alone = what.removesuffix(" and a fused optimizer")
            assert saved > max(saves.get(alone, 0), saves.get("a fused optimizer", 0)), "else the row adds nothing"
    assert saves["fsdp2 over 2 devices"] == plain.peak_bytes - estimate(sharding="fsdp2", devices=2).peak_bytes
    assert saves["a chunked cross-entropy"] == plain.peak_bytes - estimate(loss="chunked").peak_bytes
    assert saves["the optimizer's states and step on the CPU or NVMe"] == 4 * COUNT


@pytest.mark.slow
def test_small_models_at_long_sequence_and_large_ones_get_different_advice():
    small = recompute.estimate(llama_8b(num_hidden_layers=4, hidden_size=2048, vocab_size=32000), seq_len=65536)
    large = recompute.estimate(llama_8b(num_hidden_layers=40, hidden_size=5120), seq_len=512)
    assert small.dominates == "activations"
    assert small.advice[0].what.startswith("policy")
    assert large.dominates == "optimizer states"
    assert large.advice[0].what.startswith("the optimizer's states")


MANY = {**models.SHAPE, "num_hidden_layers": 12}
DEEP = {
    "llama": tiny(num_hidden_layers=12, tie_word_embeddings=False),
    "tied": tiny(num_hidden_layers=12, tie_word_embeddings=True),
    "inputs that come back one from the other": transformers.Olmo2Config(**MANY),
    "two kinds of masks": transformers.GptOssConfig(**MANY, num_local_experts=2, num_experts_per_tok=1),
    "two kinds of masks, inputs that come back": transformers.Gemma2Config(**MANY, sliding_window=8),
    "images": transformers.Qwen2VLConfig(
        text_config={**MANY, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 12, "embed_dim": 32, "hidden_size": models.HIDDEN, "num_heads": 4},
        image_token_id=3,
        architectures=["Qwen2VLForConditionalGeneration"],
    ),
}


EACH = list(product(DEEP, (None, "full", "elementwise", "auto", "kernel", "hook")))


@pytest.mark.parametrize(
    ("name", "policy"), by_default(EACH, ("two kinds of masks, inputs that come back", None), ("llama", "hook"))
)
def test_many_layers_from_few_are_all_of_them(name, policy, monkeypatch):
    config = DEEP[name]
    whole, found, steps = by_all_layers_and_by_few(monkeypatch, config, policy=policy)
    assert dict(found.moments) == dict(whole.moments)
    assert found.activation_bytes == whole.activation_bytes
    assert found.host_bytes == whole.host_bytes
    assert found.first_steps_peak_bytes == whole.first_steps_peak_bytes
    assert steps == (2 if policy is None else 6), "two of captured layers, two on tapes, two by ATen's kernels"


def by_all_layers_and_by_few(monkeypatch, config, **options):
    """Both estimates, and how many steps the second one ran."""
    with monkeypatch.context() as patched:
        patched.setattr(model_estimator, "find_stacks", lambda *given, **how: [])
        whole = estimate(config, seq_len=512, **options)
    steps = simulated_steps(monkeypatch)
    return whole, estimate(config, seq_len=512, **options), len(steps)


def simulated_steps(monkeypatch):
    """A list that gets an entry for each step that is simulated from now on."""
    steps, simulate = [], model_estimator.simulate
    monkeypatch.setattr(model_estimator, "simulate", lambda *given, **how: steps.append(1) or simulate(*given, **how))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DEEP.keys() - {"two kinds of masks"}))  # its captured layers differ by mask
def test_one_step_is_enough_under_a_further_policy(name, monkeypatch):
    whole, found, steps = by_all_layers_and_by_few(monkeypatch, DEEP[name], advise=True)
    assert found.advice == whole.advice
    assert steps < 2 * (1 + 4 * 3), "with no policy; elementwise, auto, full and without logits, in three ways each"


def test_layers_of_which_few_do_not_show_all_are_all_run(monkeypatch):
    steps = simulated_steps(monkeypatch)
    estimate(tiny(num_hidden_layers=8), seq_len=16, policy="alternate")
    assert len(steps) == 3, "of captured layers, on tapes, by ATen's kernels"


class Growing(nn.Module):
    """A layer that holds as many times its input as its index says, which its parts do not show."""

    def __init__(self, index):
        super().__init__()
        self.linear, self.index = nn.Linear(64, 64), index

    def forward(self, x):
        for _ in range(self.index):
            x = torch.tanh(x)
        return self.linear(x)


def test_layers_that_look_alike_and_hold_something_else_are_all_run():
    model = module_of(lambda self, x: self.layers(x).mean(), layers=nn.Sequential(*map(Growing, range(14))))
    x = torch.zeros(2, 64)
    found = recompute.estimate(model, batch=x, dtype="float32", advise=False)
    held = {each.path: each.nbytes for each in found.activations}
    assert held["layers.*"] == sum(range(14)) * x.nbytes


@pytest.mark.slow
def test_seventy_billion_parameters():
    config = llama_8b(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    found = estimate(config, sharding="fsdp2", devices=16)
    count = 70_553_706_496
    assert found.static_bytes.parameters == pytest.approx(2 * count / 16, rel=1e-6)
    assert sum(each.modules for each in found.activations if each.path == "model.layers.*.mlp") == 80
    assert found.dominates == "activations"


@pytest.mark.parametrize(
    ("sharding", "divided"), [("zero2", 6), ("fsdp2", 8), *slow(("ddp", 0), ("zero1", 4), ("zero3", 8))]
)
def test_shards_at_the_optimizers_step(sharding, divided):
    """Of 8 bytes a parameter, so many are divided among 8 devices; foreach's roots are of a device's share."""
    found = estimate(llama_8b(num_hidden_layers=2), sharding=sharding, devices=8, seq_len=64)
    count = found.static_bytes.parameters // 2 * (8 if divided == 8 else 1)
    buffers = found.static_bytes.in_phase("optimizer") - found.static_bytes.parameters - found.static_bytes.optimizer
    roots = 2 * count // (8 if divided else 1)
    expected = (8 - divided) * count + divided * count / 8 + roots + buffers
    assert found.moments["optimizer step"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_gradients_are_divided_as_they_come_under_zero_2():
    options = {"devices": 8, "policy": "full", "optimizer": "adamw-fused"}
    one, two = estimate(sharding="zero1", **options), estimate(sharding="zero2", **options)
    last = "backward of model.embed_tokens"
    assert one.moments[last] - two.moments[last] == pytest.approx(2 * COUNT * 7 / 8, rel=0.08)


@pytest.mark.slow
def test_autocast_holds_weights_in_both_dtypes_and_mixed_does_not():
    config = llama_8b(num_hidden_layers=2)
    pure, autocast, mixed, wide = (
        estimate(config, dtype=dtype, seq_len=1024)
        for dtype in ("bfloat16", "bfloat16-autocast", "bfloat16-mixed", "float32")
    )
    assert mixed.activation_bytes == pure.activation_bytes
    layer = 2 * (2 * HIDDEN * HIDDEN + 2 * KV_WIDTH * HIDDEN + 3 * INTERMEDIATE * HIDDEN)
    assert autocast.activation_bytes_per_layer > pure.activation_bytes_per_layer + layer
    assert wide.static_bytes.parameters == autocast.static_bytes.parameters == 2 * pure.static_bytes.parameters
    narrow, twice = ({each.path: each.nbytes for each in found.activations} for found in (pure, wide))
    for part in ("mlp", "mlp.gate_proj", "self_attn.v_proj"):  # norms hold what they compute in float32 in both
        assert twice[f"model.layers.*.{part}"] == 2 * narrow[f"model.layers.*.{part}"]


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.heads = heads

    def forward(self, x, mask=None):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def test_attention_takes_the_form_that_cuda_takes():
    """Without a mask flash, whose rows' logsumexp is (heads, tokens); never the scores (heads, tokens, tokens)."""
    x = torch.empty(1, 1000, 64)
    scores = 4 * 1000 * 1000 * 2
    flash = estimate(Block(), batch=(x.bfloat16(),))
    masked = estimate(Block(), batch=(x.bfloat16(), torch.ones(1000, 1000, dtype=torch.bool)))
    assert flash.activation_bytes < scores // 4
    assert scores // 4 < masked.activation_bytes < scores  # the mask, as numbers
    with_math = estimate(Block(), dtype="float32", batch=(x, torch.ones(1000, 1000)))
    assert with_math.activation_bytes < 2 * scores  # efficient, in float32 too


def test_encoders_of_torch_call_attention_past_modes():
    """F.multi_head_attention_forward calls it itself."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    found = estimate(layer, batch=torch.empty(1, 1000, 64, dtype=torch.bfloat16))
    assert found.activation_bytes < 4 * 1000 * 1000 * 2


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_dropout_saves_a_mask_of_bools_as_on_cuda(p):
    """One byte an element, also where a function of torch's calls dropout; the CPU saves factors in the input's dtype.

    A dropout of nothing saves nothing.
    """
    x = torch.empty(1, 1024, 64, dtype=torch.bfloat16)
    without, dropping = (
        estimate(nn.TransformerEncoderLayer(64, 4, 128, dropout=rate, batch_first=True), batch=x).activation_bytes
        for rate in (0.0, p)
    )
    elements = 1024 * (64 + 128 + 64)  # after attention, after the activation, after the second Linear
    output = 1024 * 128 * 2  # of the second one, which the second Linear saves; the activation saves its own
    assert dropping - without == (elements + output if p else 0)
    assert F.dropout is cuda_semantics._torchs_dropout


def test_modules_are_left_as_they_are_and_may_be_on_meta():
    model = models.make("llama").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with recompute.apply(model, "full"):
        real = estimate(model, seq_len=32)
        assert real.settings.policy == "none"
        assert real == estimate(model.to("meta"), seq_len=32)
    assert not model.training
    assert state.keys() == model.state_dict().keys()
    assert F.scaled_dot_product_attention is model_estimator.torch.nn.functional.scaled_dot_product_attention


def test_tensors_in_lists_and_dicts_of_a_module_are_as_those_that_are_attributes():
    held = [torch.rand(64), {"shift": torch.rand(64)}]
    linear = nn.Linear(64, 64)
    listed = module_of(lambda self, x: self.linear(x) * self.held[0] + self.held[1]["shift"], held=held, linear=linear)
    named = module_of(lambda self, x: self.linear(x) * self.a + self.b, a=held[0], b=held[1]["shift"], linear=linear)
    peaks = {estimate(each, batch=torch.rand(128, 64), dtype="float32").peak_bytes for each in (listed, named)}
    assert len(peaks) == 1


def test_what_a_model_is_described_by(tmp_path):
    config = tiny()
    config.save_pretrained(tmp_path)
    found = [estimate(source, seq_len=128).as_dict() for source in (config, str(tmp_path), tmp_path / "config.json")]
    assert found[0] == found[1] == found[2]
    assert config.max_position_embeddings == 64  # and yet 128 tokens were estimated
    assert found[0]["batch"] == "input_ids 1x128, labels 1x128"


def test_json_has_what_was_promised(plain):
    found = json.loads(plain.to_json())
    promised = {"static_bytes", "activation_bytes", "activation_bytes_per_layer", "logits_peak_bytes", "peak_bytes"}
    assert promised | {"peak_moment", "moments", "advice", "dominates", "activations", "parts"} <= found.keys()
    assert {"parameters", "gradients", "optimizer", "buffers", "total"} == found["static_bytes"].keys()
    assert found["peak_bytes"] == max(found["moments"].values()) == plain.peak_bytes
    assert sum(each["nbytes"] for each in found["activations"]) == found["activation_bytes"]


def test_tables_say_it_all(plain):
    text = str(plain)
    assert text.startswith("LlamaForCausalLM, 8,030,261,248 parameters, bfloat16; input_ids 1x4096, labels 1x4096\n")
    for part in (
        "75.45 GiB, during: backward of the loss",
        "model.layers.*.mlp.gate_proj",
        "One layer holds 784.5 MiB",
    ):
        assert part in text


def test_a_batch_that_forward_does_not_take_is_told_as_that():
    expected = "a batch for the forward of Block, forward.x.* found the keywords y"
    with pytest.raises(ModelError, match=expected):
        estimate(Block(), batch={"y": torch.empty(1, 8, 64)})


def test_a_wrapped_forward_takes_what_its_wrapper_takes():
    class Wrapped(Block):
        @functools.wraps(Block.forward)
        def forward(self, *args, scale=1.0, **others):
            return super().forward(*args, **others) * scale

    assert estimate(Wrapped(), batch={"x": torch.empty(1, 8, 64), "scale": 2.0}).activation_bytes > 0


class OwnLanguageModel(nn.Module):
    """Written by hand, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.readout = nn.Linear(64, 1000, bias=False)

    def forward(self, ids):
        logits = self.readout(self.blocks(self.words(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_a_model_without_a_configuration_has_logits_too():
    ids = torch.zeros(2, 256, dtype=torch.int64)
    found = estimate(OwnLanguageModel(), batch={"ids": ids}, dtype="float32", advise=True)
    assert found.logits_peak_bytes == 3 * 512 * 1000 * 4  # logits, log-probabilities and a gradient
    assert "a chunked cross-entropy" in [each.what for each in found.advice]
    chunked = estimate(OwnLanguageModel(), batch=(ids,), dtype="float32", loss="chunked")
    assert chunked.logits_peak_bytes < found.logits_peak_bytes / 2
    assert chunked.peak_bytes < found.peak_bytes


def experts_of_groups(tokens, weight):
    """A product for each of two groups of tokens, and its gradients."""
    tokens, weight = (each.detach().requires_grad_() for each in (tokens, weight))
    product = F.grouped_mm(tokens, weight, offs=torch.tensor([3, 8], dtype=torch.int32))
    return [product, *torch.autograd.grad(product, (tokens, weight), torch.ones_like(product))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_are_multiplied_in_groups_as_real_ones_are(dtype):
    tokens, weight = torch.randn(8, 16, dtype=dtype), torch.randn(2, 16, 32, dtype=dtype)
    real = experts_of_groups(tokens, weight)
    with FakeMode():
        fake = experts_of_groups(torch.empty_like(tokens), torch.empty_like(weight))
    assert [(each.shape, each.dtype, each.stride()) for each in fake] == [
        (each.shape, each.dtype, each.stride()) for each in real
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16-autocast"])
def test_experts_are_estimated_in_float32_too(dtype):
    config = models.make("mixtral").config
    config._experts_implementation = "grouped_mm"
    found = estimate(config, seq_len=64, dtype=dtype, advise=False)
    assert found.activation_bytes > estimate(config, seq_len=64, dtype="bfloat16", advise=False).activation_bytes


class Asks(nn.Module):
    def forward(self, x):
        return x if bool(x.max() > 0) else -x


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (None, {"loss": "chunk"}, EstimateError, r"loss: .*\(did you mean 'chunked'\?\)"),
        (None, {"batch_size": 0}, EstimateError, "batch_size: expected a whole number, at least 1; found 0"),
        (None, {"seq_len": 2.5}, EstimateError, "seq_len: expected a whole number, at least 1; found 2.5"),
        (None, {"microbatches": 4, "microbatches_in_flight": 5}, EstimateError, "at most the 4 microbatches"),
        (7, {}, ModelError, "expected an nn.Module, a configuration of transformers, a path or a name; found int: 7"),
        (Block(), {}, ModelError, r"Block: a batch is missing. Pass forward's arguments"),
        (nn.ReLU(), {"batch": torch.zeros(2)}, ModelError, "ReLU: expected a model with parameters to train"),
        (Block(), {"batch": torch.zeros(1, 2, 64).bfloat16(), "loss": "chunked"}, EstimateError, "Block has none"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(Asks())),
            {"batch": torch.zeros(2, 4).bfloat16()},
            ModelError,
            r"module '1\.0' \(Asks\) cannot run on fake tensors, which have no values: .* recompute\.profile",
        ),
    ],
)
def test_mistakes(model, options, error, message):
    with pytest.raises(error, match=message):
        estimate(tiny() if model is None else model, **options)


def test_microbatches_in_flight_hold_as_much_each():
    """Gradients of those before are there in forward, too; what runs at the moment counts once."""
    one = estimate(tiny(), batch_size=2, seq_len=32)
    accumulated = estimate(tiny(), batch_size=2, seq_len=32, microbatches=8)
    flying = estimate(tiny(), batch_size=2, seq_len=32, microbatches=8, microbatches_in_flight=4)
    batches = 7 * one.static_bytes.buffers["the batch"].nbytes
    gradients, held = one.static_bytes.gradients, one.activation_bytes
    assert accumulated.activation_bytes == held
    assert flying.activation_bytes == 4 * held
    assert sum(each.nbytes for each in flying.activations) == 4 * held
    for name, nbytes in one.moments.items():
        more = accumulated.moments[name] - nbytes - batches
        if name.startswith("forward"):
            assert gradients <= more <= 1.1 * gradients  # in blocks of the allocator's
        if name != model_estimator.OPTIMIZER_STEP:
            assert 0 <= more <= 1.1 * gradients
            assert flying.moments[name] == accumulated.moments[name] + 3 * held
    assert sum(flying.parts.values()) == flying.peak_bytes
    assert "8 microbatches a step, 4 in flight" in str(flying)
    assert "microbatch" not in str(one)
