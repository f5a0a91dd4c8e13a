"""Which heads go without logits: of many families, adapted, frozen; and what is said of those that do not."""

import pytest
import torch
import transformers
from engine_testing import function_of
from layer_testing import causal
from tiers import slow
from tiny import WideTensors
from torch import Tensor, nn
from torch.nn import functional as F

import recompute
from recompute.substitution.lazy_logits import LazyLogits

WORDS, TOKENS, WIDTH = 517, 32, 64
POLICY = {"rules": [{"type": "head", "action": "recompute", "via": "kernel"}]}
IDS = torch.randint(5, WORDS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
SHAPE = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
PARTS = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_model": WIDTH, "dropout": 0.0, "vocab_size": WORDS,
}  # fmt: skip


def one_layer(name, **options):
    return causal(name, **{**SHAPE, **options})


def t5(tied):
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(
        **sizes, tie_word_embeddings=tied, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


GPT = {"n_layer": 1, "n_head": 4}
FAMILIES = {
    "llama": one_layer("Llama"),
    "tied": one_layer("Llama", tie_word_embeddings=True),
    "cohere": one_layer("Cohere"),
    "granite": one_layer("Granite", logits_scaling=8.0),
    "gemma 2": one_layer("Gemma2", head_dim=16),
    "gemma 3": one_layer("Gemma3Text", head_dim=16),
    "gemma 3 with a cap": one_layer("Gemma3Text", head_dim=16, final_logit_softcapping=2.0),
    "falcon": one_layer("Falcon", hidden_dropout=0.0),
    "bloom": one_layer("Bloom", **GPT),
    "mpt": one_layer("Mpt", d_model=WIDTH, n_heads=4, n_layers=1, max_seq_len=64),
    "phi, with a bias": one_layer("Phi"),
    "t5": lambda: t5(tied=True),
    "t5, untied": lambda: t5(tied=False),
    "roberta, whose head has several parts": one_layer("Roberta", is_decoder=True, hidden_dropout_prob=0.0),
    "bart, whose bias is a buffer": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**PARTS)),
}


def of_the_model(model):
    return model(input_ids=IDS, labels=IDS).loss


def of_ones_own(model):
    scores = F.log_softmax(model(input_ids=IDS).logits[:, :-1] / 0.7, -1)
    entropy = -(scores.exp() * scores).sum(-1)
    return (scores.gather(-1, IDS[:, 1:, None]).squeeze(-1) - 0.01 * entropy).mean()


def step(model, loss_of=of_the_model):
    """The loss and gradients of a step, and the ops that gave logits, with a row for every token."""
    torch.manual_seed(1)
    model.zero_grad()
    with WideTensors(WORDS) as wide:
        loss = loss_of(model)
        loss.backward()
    ops = [op for op, shape in wide.found if shape[:-1].numel() in (TOKENS, TOKENS - 2)]
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, ops


def assert_goes_without_logits(model, loss_of=of_the_model):
    expected, ops = step(model, loss_of)
    assert ops
    handle = recompute.apply(model, POLICY)
    found, ops = step(model, loss_of)
    assert ops == []
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return handle


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_many_families_make_no_logits(family):
    torch.manual_seed(0)
    handle = assert_goes_without_logits(FAMILIES[family]().train())
    assert "linear_cross_entropy (if nothing else reads the logits)" in handle.explain()


@pytest.mark.parametrize("family", ["llama", *slow("cohere", "granite", "gemma 2")])
def test_log_probabilities_and_entropies_of_ones_own_go_without_logits_too(family):
    torch.manual_seed(0)
    assert_goes_without_logits(FAMILIES[family]().train(), of_ones_own)


class Adapted(nn.Module):
    """A Linear with a LoRA adapter, as PEFT puts it in the place of the Linear."""

    def __init__(self, base, dropout=0.0, dtype=torch.float32):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False, dtype=dtype)})

    def forward(self, x):
        result = self.base_layer(x)
        thin = self.lora_A["default"](self.lora_dropout(x.to(self.lora_A["default"].weight.dtype)))
        return (result + self.lora_B["default"](thin) * 2.0).to(result.dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "gemma 3 with a cap", "granite"])
def test_an_adapter_on_the_head_adds_a_thin_product(family, dropout):
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    model.lm_head = Adapted(model.lm_head, dropout)
    explained = assert_goes_without_logits(model).explain()
    assert "lm_head.base_layer" in explained
    assert "lm_head.lora_B.default" in explained
    assert model.lm_head.base_layer.weight.grad is None


def test_an_adapter_in_float32_on_a_narrower_head_rounds_as_the_head_does():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train().bfloat16()
    model.lm_head = Adapted(model.lm_head, dtype=torch.float32)
    expected, _ = step(model)
    recompute.apply(model, POLICY)
    found, ops = step(model)
    assert ops == []
    for name, value in expected.items():
        assert (found[name] - value).float().norm() <= 0.02 * value.float().norm(), name
        assert found[name].dtype is value.dtype


def test_a_frozen_head_gets_no_gradient():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train()
    model.lm_head.requires_grad_(False)
    assert_goes_without_logits(model)
    assert model.lm_head.weight.grad is None


class Quantized(nn.Linear):
    """As bitsandbytes has it: its forward is a Function of its own."""

    def forward(self, x):
        return _Rounded.apply(x, self.weight)


_Rounded = function_of(
    lambda x, weight: F.linear(x, (weight * 64).round() / 64),
    lambda gradient, weight: (gradient @ weight, None),
    saves=lambda result, x, weight: (weight,),
)


class Packed(Tensor):
    """As torchao has a quantized weight: a Parameter of a class of its own."""


def replaced(how):
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train()
    if how == "function":
        head = Quantized(WIDTH, WORDS, bias=False)
        model.lm_head = head
    elif how == "weight":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed), requires_grad=False)
    else:
        model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("function", "lm_head is a Quantized, or has hooks; expected a plain nn.Linear"),
        ("weight", "lm_head is a Linear with a Packed as its weight, which no kernel takes"),
        ("hook", "lm_head is a Linear, or has hooks; expected a plain nn.Linear"),
    ],
)
def test_a_head_that_no_kernel_takes_has_logits_and_explain_says_why(how, why):
    model = replaced(how)
    handle = recompute.apply(model, POLICY)
    found, ops = step(model)
    assert ops
    torch.testing.assert_close(found, step(replaced(how))[0])
    assert f"No loss is computed without logits: {why}." in handle.explain(width=1000)


def test_explain_says_that_there_is_no_head():
    torch.manual_seed(0)
    model = FAMILIES["llama"]()
    policy = {"rules": [*POLICY["rules"], {"type": "block", "action": "recompute"}]}
    with pytest.warns(recompute.errors.PolicyWarning, match="finds no head"):
        handle = recompute.apply(model.model, policy)
    assert "No loss is computed without logits, because no head was found" in handle.explain(width=1000)
    assert "without logits" not in recompute.apply(FAMILIES["tied"](), POLICY).explain(width=1000)


def test_explain_names_what_had_logits_made():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train()
    handle = recompute.apply(model, POLICY)
    for _ in range(2):
        model(input_ids=IDS).logits.tanh().sum().backward()
    with torch.no_grad():
        model(input_ids=IDS).logits.exp()
    assert "; logits were made for tanh\n" in handle.explain(width=1000)


def test_a_model_returns_logits_that_are_made_when_they_are_read_and_without_gradients_to_come_at_once():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train()
    expected = model(input_ids=IDS, labels=IDS)
    recompute.apply(model, POLICY)
    output = model(input_ids=IDS, labels=IDS)
    assert type(output.logits) is LazyLogits
    assert output.logits.is_lazy
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits + 0, expected.logits)
    with torch.no_grad():
        output = model(input_ids=IDS, labels=IDS)
        assert output.logits.is_lazy
        torch.testing.assert_close(output.loss, expected.loss)
    with torch.inference_mode():
        assert type(model(input_ids=IDS, labels=IDS).logits) is Tensor
    assert type(model.eval()(input_ids=IDS, labels=IDS).logits) is Tensor
