"""The presets on real Hugging Face models, built from tiny configurations without memory."""

from collections import Counter

import models
import pytest
import torch
import transformers

from recompute.attach.module_entries import module_entries
from recompute.policy.loading import load_policy, preset_names
from recompute.policy.matching import ModuleEntry, assign, unmatched_rules

LAYERS = 5
SIZES = models.SHAPE | {"num_hidden_layers": LAYERS}
NORMS_PER_LAYER = {"Llama": 2, "Mistral": 2, "Qwen2": 2, "Qwen3": 4, "Gemma": 2, "Gemma2": 4, "Gemma3": 6}
FORMS = [(family, form) for family in NORMS_PER_LAYER for form in ("ForCausalLM", "Model")]
NORMS = ("LayerNorm", "RMSNorm")
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}


def build(family, form):
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**SIZES)
    model_class = getattr(transformers, f"{family}{text if form == 'Model' else ''}{form}")
    with torch.device("meta"):
        return model_class(config)


def build_gemma3_with_vision():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**vision, image_size=28, patch_size=14)
    text = transformers.Gemma3TextConfig(**SIZES)
    with torch.device("meta"):
        return transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(text_config=text, vision_config=vision)
        )


def entries(model):
    return module_entries(model, type(model).__name__)[0]


def governed(preset, model):
    policy, modules = load_policy(preset), entries(model)
    assignment = assign(policy, modules)
    return assignment, unmatched_rules(policy, modules, assignment)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_what_each_preset_governs_of_a_decoder_and_nothing_else(family, form):
    model = build(family, form)
    prefix = "model." if form == "ForCausalLM" else ""
    layers = [f"{prefix}layers.{index}" for index in range(LAYERS)]
    norms = [path for path, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    mlps = [f"{layer}.mlp{part}" for layer in layers for part in ("", ".act_fn")]
    head = ["lm_head"] if form == "ForCausalLM" else []
    assert len(norms) == NORMS_PER_LAYER[family] * LAYERS + 1
    expected = {
        **{preset: mlps + norms for preset in ("hook", "kernel")},
        **{"full": layers, "alternate": layers[::2], "none": []},
        **{"elementwise": layers + norms, "auto": layers + norms + head},
    }
    for preset, paths in expected.items():
        assignment, complaints = governed(preset, model)
        assert sorted(assignment) == sorted(paths), preset
        assert len(complaints) == (preset == "auto" and not head)  # of which `apply` makes nothing: others fit


def resnet():
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**RESNET))


def layers_of(name):
    """How a model is built, its layers by class, and the blocks inside of those."""
    if name == "resnet":
        layers = {"ResNetConvLayer": 1, "ResNetBasicLayer": 1 + 2}
        return resnet, layers, {"ResNetConvLayer": 2 * (1 + 2)}
    family = models.FAMILIES[name]
    layers = dict.fromkeys(family.layers, 2 * models.LAYERS if name == "t5" else models.LAYERS)
    experts = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}.get(name)
    inner = {f"{experts}SparseMoeBlock": models.LAYERS} if experts else {}
    return lambda: family.build(**family.shape), layers, inner


@pytest.mark.parametrize("name", [*models.FAMILIES, "resnet"])
@pytest.mark.parametrize("preset", ["elementwise", "auto"])
def test_elementwise_and_auto_govern_the_layers_of_every_architecture(preset, name):
    make, layers, inner = layers_of(name)
    with torch.device("meta"):
        model = make()
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


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_bears_the_name_of_its_file_and_describes_itself(preset):
    policy = load_policy(preset)
    assert policy.name == preset
    assert policy.description.endswith(".")
    assert len(policy.description.split()) > 10
