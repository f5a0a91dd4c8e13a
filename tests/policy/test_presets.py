"""The presets on real Hugging Face models, built from tiny configurations without memory."""

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from recompute.attach.module_entries import module_entries
from recompute.policy.loading import load_policy, preset_names
from recompute.policy.matching import ModuleEntry, assign, unmatched_rules

LAYERS = 5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
NORMS_PER_LAYER = {"Llama": 2, "Mistral": 2, "Qwen2": 2, "Qwen3": 4, "Gemma": 2, "Gemma2": 4, "Gemma3": 6}
FORMS = [(family, form) for family in NORMS_PER_LAYER for form in ("ForCausalLM", "Model")]
BERT_SIZES = {
    key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
# Of a model: its class, its configuration, its layers by class, and the blocks inside of those.
ARCHITECTURES = [
    (
        "MixtralForCausalLM",
        "MixtralConfig",
        SIZES | {"num_local_experts": 2},
        {"MixtralDecoderLayer": LAYERS},
        {"MixtralSparseMoeBlock": LAYERS},
    ),
    (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SIZES | {"num_experts": 2, "moe_intermediate_size": 16},
        {"Qwen3MoeDecoderLayer": LAYERS},
        {"Qwen3MoeSparseMoeBlock": LAYERS},
    ),
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4}, {"GPT2Block": 3}, {}),
    ("BertForMaskedLM", "BertConfig", BERT_SIZES, {"BertLayer": LAYERS}, {}),
    ("ViTForImageClassification", "ViTConfig", BERT_SIZES, {"ViTLayer": LAYERS}, {}),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2},
        {"T5Block": 3 + 2},
        {},
    ),
    (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"d_model": 24, "encoder_layers": 3, "decoder_layers": 2},  # of 6 heads
        {"WhisperEncoderLayer": 3, "WhisperDecoderLayer": 2},
        {},
    ),
    (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        {"ResNetConvLayer": 1, "ResNetBasicLayer": 1 + 2},
        {"ResNetConvLayer": 2 * (1 + 2)},
    ),
]
NORMS = ("LayerNorm", "RMSNorm")
ARCHITECTURE_IDS = [model_class for model_class, *_ in ARCHITECTURES]


def build(family, form):
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**SIZES)
    model_class = getattr(transformers, f"{family}{text if form == 'Model' else ''}{form}")
    with torch.device("meta"):
        return model_class(config)


def build_gemma3_with_vision():
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**SIZES), vision_config=transformers.SiglipVisionConfig(**vision)
    )
    with torch.device("meta"):
        return transformers.Gemma3ForConditionalGeneration(config)


def entries(model):
    return module_entries(model, type(model).__name__)[0]


def governed(preset, model):
    policy, modules = load_policy(preset), entries(model)
    assignment = assign(policy, modules)
    return assignment, unmatched_rules(policy, modules, assignment)


@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize("preset", ["hook", "kernel"])
def test_hook_and_kernel_govern_every_norm_every_mlp_with_its_activation_and_nothing_else(preset, family, form):
    model = build(family, form)
    assignment, complaints = governed(preset, model)
    last = Counter(path.split(".")[-1] for path in assignment)
    assert (last.pop("mlp"), last.pop("act_fn")) == (LAYERS, LAYERS)
    assert all("norm" in part for part in last)
    assert sum(last.values()) == NORMS_PER_LAYER[family] * LAYERS + 1
    assert complaints == []


@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize(("preset", "every"), [("full", 1), ("alternate", 2)])
def test_full_governs_every_decoder_layer_and_alternate_every_second_and_nothing_else(preset, every, family, form):
    assignment, complaints = governed(preset, build(family, form))
    prefix = "model." if form == "ForCausalLM" else ""
    assert assignment == {f"{prefix}layers.{index}": 0 for index in range(0, LAYERS, every)}
    assert complaints == []


@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize("preset", ["elementwise", "auto"])
def test_elementwise_and_auto_govern_every_decoder_layer_and_norm_and_auto_the_head(preset, family, form):
    assignment, complaints = governed(preset, build(family, form))
    prefix = "model." if form == "ForCausalLM" else ""
    outside = {path: rule for path, rule in assignment.items() if f"{prefix}layers." not in path}
    has_head = preset == "auto" and form == "ForCausalLM"
    assert outside == {f"{prefix}norm": 0} | ({"lm_head": 1} if has_head else {})
    inside = {path for path, rule in assignment.items() if rule == 0} - outside.keys()
    layers = {path for path in inside if path.count(".") == prefix.count(".") + 1}
    assert layers == {f"{prefix}layers.{index}" for index in range(LAYERS)}
    assert all("norm" in path.split(".")[-1] for path in inside - layers)
    assert len(complaints) == (preset == "auto" and not has_head)  # of which `apply` makes nothing: others fit


@pytest.mark.parametrize(
    ("model_class", "config_class", "sizes", "layers", "inner"), ARCHITECTURES, ids=ARCHITECTURE_IDS
)
@pytest.mark.parametrize("preset", ["elementwise", "auto"])
def test_elementwise_and_auto_govern_the_layers_of_every_architecture(
    preset, model_class, config_class, sizes, layers, inner
):
    config = getattr(transformers, config_class)(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    assignment, complaints = governed(preset, model)
    classes = {path: type(model.get_submodule(path)).__name__ for path, rule in assignment.items() if rule == 0}
    norms = {path for path, name in classes.items() if name.endswith("Norm")}
    assert norms == {path for path, module in model.named_modules() if type(module).__name__.endswith(NORMS)}
    others = classes.keys() - norms
    nested = {path for path in others if any(path.startswith(f"{other}.") for other in others)}
    assert Counter(classes[path] for path in others - nested) == layers
    assert Counter(classes[path] for path in nested) == inner
    assert all("rules[1]" in complaint for complaint in complaints)


@pytest.mark.parametrize("preset", ["elementwise", "auto"])
@pytest.mark.parametrize("path", ["", "layers.0", "layer1.2", "transformer.h.10", "encoder.layers.encoder_layer_0"])
def test_elementwise_and_auto_know_a_layer_by_its_class_wherever_it_is(preset, path):
    """Also as the root: a decorated class, or one layer alone under the policy."""
    layers = ["Block", "TransformerBlock", "EncoderBlock", "BasicBlock", "TransformerEncoderLayer"]
    layers += ["LayerNorm", "LlamaRMSNorm", "NemotronLayerNorm1P"]
    others = ["BatchNorm2d", "T5LayerFF", "ModuleList", "MLP", "Attention", "LlamaModel", "LayerDrop", "BlockList"]
    for name in layers + others:
        assert assign(load_policy(preset), [ModuleEntry(path, name)]) == ({path: 0} if name in layers else {})


def test_none_governs_nothing():
    assert governed("none", build("Llama", "ForCausalLM")) == ({}, [])


NORMS_OF_BOTH = {"LayerNorm": 2 * 2 + 2}, {"Gemma3RMSNorm": 6 * LAYERS + 1}
MLPS_OF_BOTH = {"SiglipMLP": 2 + 1}, {"Gemma3MLP": LAYERS}
LAYERS_OF_BOTH = {"SiglipEncoderLayer": 2}, {"Gemma3DecoderLayer": LAYERS}


def both(these, those):
    return [one | other for one, other in zip(these, those, strict=True)]


@pytest.mark.parametrize(
    ("preset", "in_tower", "in_decoder"),
    [
        *((preset, *both(MLPS_OF_BOTH, NORMS_OF_BOTH)) for preset in ("hook", "kernel")),
        *((preset, *both(LAYERS_OF_BOTH, NORMS_OF_BOTH)) for preset in ("elementwise", "auto")),
        ("full", *LAYERS_OF_BOTH),
        ("alternate", {"SiglipEncoderLayer": 1}, {"Gemma3DecoderLayer": 3}),
    ],
)
def test_both_a_vision_tower_and_the_decoder_beside_it_are_governed(preset, in_tower, in_decoder):
    model = build_gemma3_with_vision()
    assignment, complaints = governed(preset, model)
    for part, expected in (("vision_tower", in_tower), ("language_model", in_decoder)):
        paths = [path for path, rule in assignment.items() if part in path and rule == 0]
        found = Counter(type(model.get_submodule(path)).__name__ for path in paths)
        assert {name: count for name, count in found.items() if "GELU" not in name} == expected
    assert complaints == []


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "backbone"])
def test_hook_and_kernel_find_the_mlps_of_a_decoder_inside_a_wrapper(wrapper):
    for form in ("ForCausalLM", "Model"):
        model = nn.ModuleDict({wrapper: build("Llama", form)})
        for preset in ("hook", "kernel"):
            paths = governed(preset, model)[0]
            assert [path.endswith("mlp") for path in paths].count(True) == LAYERS
            assert ["norm" in path.split(".")[-1] for path in paths].count(True) == 2 * LAYERS + 1


@pytest.mark.parametrize(
    ("preset", "actions"),
    [
        ("none", []),
        ("full", [("checkpoint", "auto")]),
        ("alternate", [("checkpoint", "auto")]),
        ("hook", [("recompute", "hook")]),
        ("kernel", [("recompute", "kernel")]),
        ("elementwise", [("recompute", "hook")]),
        ("auto", [("recompute", "auto"), ("recompute", "auto")]),
    ],
)
def test_a_preset_does_what_its_name_says(preset, actions):
    rules = load_policy(preset).rules
    assert [(rule.action, rule.via) for rule in rules] == actions
    assert not any(rule.rerun or rule.keep for rule in rules)


@pytest.mark.parametrize(("one", "other"), [("hook", "kernel"), ("elementwise", "auto")])
def test_presets_that_differ_in_via_alone_select_the_same_modules(one, other):
    selections = [[(rule.match, rule.type, rule.layers) for rule in load_policy(name).rules] for name in (one, other)]
    assert selections[0] == selections[1][: len(selections[0])]  # `auto` has the head, too, of which no op comes back


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_bears_the_name_of_its_file_and_describes_itself(preset):
    policy = load_policy(preset)
    assert policy.name == preset
    assert policy.description.endswith(".")
    assert len(policy.description.split()) > 10
