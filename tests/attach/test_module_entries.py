"""Which modules are a model's repeated blocks, and which its head, wherever they are and whatever they are called."""

from collections import OrderedDict

import pytest
import torch
import transformers
from torch import nn

import recompute
from recompute.attach.module_entries import module_entries


class Through(nn.Module):
    """Runs all that it holds, so that it has a forward."""

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class Block(Through):
    """As nanoGPT calls it."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Unit(Block):
    """Of a name that says nothing."""


class Bare(Through):
    """Without a norm."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class Expert(Bare):
    pass


class ExpertLayer(Block):
    pass


class Mixture(nn.Module):
    """A layer that holds lists of its own: experts, and attention heads."""

    def __init__(self, expert=Expert):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.heads = nn.ModuleList(Bare() for _ in range(2))
        self.experts = nn.ModuleList(expert() for _ in range(3))

    def forward(self, x):
        return x + sum(each(self.norm(x)) for each in (*self.heads, *self.experts))


class MixtureLayer(Mixture):
    pass


class Stage(Through):
    """Of a vision model: no layer, but its layers are."""

    def __init__(self, depth=2):
        super().__init__()
        self.downsample = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.layers = nn.Sequential(*(Unit() for _ in range(depth)))


class Stem(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


class StemLayer(Stem):
    pass


class Layers(nn.ModuleList):
    """Has another child, too."""

    def __init__(self):
        super().__init__(several(Block))
        self.norm = nn.LayerNorm(4)


class Model(Through):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def several(make, count=3):
    return [make() for _ in range(count)]


def blocks(model):
    return [entry.path for entry in module_entries(model, type(model).__name__)[0] if entry.is_block]


def stack(path, count=3):
    return [f"{path}.{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(layers=nn.ModuleList(several(Block))), stack("layers")),
        (Model(layers=Layers()), stack("layers")),
        (Model(transformer=nn.ModuleDict({"wte": nn.Linear(4, 4), "h": nn.ModuleList(several(Block))})),
            stack("transformer.h")),
        (Model(layers=nn.ModuleDict({str(index): Block() for index in range(3)})), stack("layers")),
        (Model(blocks=nn.Sequential(*several(Unit)), head=nn.Linear(4, 4)), stack("blocks")),
        (nn.Sequential(Stem(), *several(Unit), nn.Linear(4, 4)), ["1", "2", "3"]),
        (Model(one=nn.ModuleList([Block()]), other=nn.ModuleList([Unit()])), ["one.0", "other.0"]),
        (Model(one=Model(layers=nn.ModuleList(several(Unit))), two=Model(layers=nn.ModuleList(several(Block, 2)))),
            [*stack("one.layers"), *stack("two.layers", 2)]),
        (Model(layers=nn.ModuleList([Block(), MixtureLayer(), Block()])), stack("layers")),
        (Model(layers=nn.ModuleList(several(Mixture))), stack("layers")),
        (Model(layers=nn.ModuleList(several(lambda: MixtureLayer(ExpertLayer)))), stack("layers")),
        (Model(stem=Stem(), stages=nn.ModuleList(several(Stage, 2))),
            [*stack("stages.0.layers", 2), *stack("stages.1.layers", 2)]),
        (nn.Sequential(nn.Sequential(*several(Unit, 2)), Stem(), nn.Sequential(*several(Unit, 2))),
            [*stack("0", 2), *stack("2", 2)]),
        (Model(layers=nn.ModuleList(nn.ModuleList(several(Unit, 2)) for _ in range(2))),
            [*stack("layers.0", 2), *stack("layers.1", 2)]),
        (nn.ModuleDict({name: Model(layers=nn.ModuleList([Block()])) for name in ("student", "teacher")}),
            ["student.layers.0", "teacher.layers.0"]),
        (nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3))), ["0", "1", "2"]),
        (Model(layers=nn.ModuleList([shared := Block(), shared])), stack("layers", 2)),
        (Model(units=nn.Sequential(*several(Bare))), stack("units")),  # there are no others
        (Model(stem=StemLayer(), layers=nn.ModuleList(several(Block)), heads=nn.ModuleList(several(Bare))),
            stack("layers")),
        (Model(stem=Stem(), s1=Model(b1=Unit()), s2=Model(b1=Unit(), b2=Unit())), ["s1.b1", "s2.b1", "s2.b2"]),
        (Model(down1=Unit(), down2=Unit(), up=Unit(), end1=Bare(), end2=Bare()), ["down1", "down2"]),
        (Model(part1=Unit(), part2=Stem(), layers=nn.Sequential(*several(Bare))), stack("layers")),
        (Model(part1=Unit(), part2=Unit(), layers=nn.Sequential(*several(Unit))), stack("layers")),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        (Model(norm1=nn.LayerNorm(4), norm2=nn.LayerNorm(4), fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 4)), []),
        (Model(norms=nn.ModuleList(several(lambda: nn.LayerNorm(4)))), []),
        (Model(stem=Stem(), head=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))), []),
        (Block(), [""]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_blocks_are_the_outermost_modules_that_repeat(model, expected):
    assert blocks(model) == expected


def heads(model):
    return [entry.path for entry in module_entries(model, type(model).__name__)[0] if entry.is_head]


def embedded(**parts):
    """A model with 11 words and 5 positions, 4 wide."""
    return Model(words=nn.Embedding(11, 4), positions=nn.Embedding(5, 4), **parts)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (embedded(output=nn.Linear(4, 11)), ["output"]),
        (embedded(predictions=Model(dense=nn.Linear(4, 4), decoder=nn.Linear(4, 11))), ["predictions.decoder"]),
        (embedded(lm_head=nn.Linear(4, 16)), ["lm_head"]),  # padded
        (embedded(lm_head=Model(dense=nn.Linear(4, 4), decoder=nn.Linear(4, 11))), ["lm_head.decoder"]),  # RoBERTa's
        (embedded(lm_head=Model(dense=nn.Linear(4, 4), decoder=nn.Linear(4, 16))), ["lm_head"]),  # all of it
        (Model(inner=Model(lm_head=nn.Linear(4, 16))), ["inner.lm_head"]),
        (embedded(classifier=nn.Linear(4, 5), back=nn.Linear(11, 4)), []),
        (embedded(blocks=nn.ModuleList([Block(), Block()]), gate=nn.Linear(4, 2)), []),
        (Model(words=nn.Embedding(4, 4), blocks=nn.ModuleList([Block(), Block()])), []),  # with square Linears
        (Model(head=nn.Linear(4, 11)), []),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else "",
)
def test_a_head_is_as_large_as_the_largest_embedding_or_has_the_name(model, expected):
    assert heads(model) == expected


def test_the_words_of_a_model_of_transformers_need_not_be_its_largest_embedding():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=11, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    assert heads(transformers.BertForMaskedLM(config)) == ["cls.predictions.decoder"]
    assert heads(transformers.BertForSequenceClassification(config)) == []  # with as many classes as kinds of tokens


def test_blocks_run_again_from_their_inputs_under_full():
    """What is found runs, and is bit for bit what it was, and in an ordered dict too."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(stem=Stem(), first=Unit(), second=Unit()))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with recompute.apply(model, "full") as handle:
        model(x).sum().backward()
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))
    assert handle.stats().frames == 2


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("every 2", ["a.0", "a.2", "b.one", "c.2"]),
        ("last 1", ["a.2", "b.two"]),
        ([1, 2], ["a.1", "a.2", "b.two", "c.1", "c.2"]),
    ],
)
def test_layers_count_blocks_in_any_kind_of_list(layers, expected):
    model = Model(
        a=nn.ModuleList(several(Unit)),
        b=nn.ModuleDict({"one": Unit(), "two": Unit()}),
        c=nn.Sequential(Stem(), Unit(), Unit(), nn.Linear(4, 4)),  # whose blocks are at 1 and 2 of it
    )
    policy = {"rules": [{"type": "block", "layers": layers, "action": "checkpoint"}]}
    with recompute.apply(model, policy) as handle:
        assert [attachment.path for attachment in handle._attachments] == expected
    inside = {"rules": [{"type": "GELU", "layers": layers, "action": "checkpoint"}]}
    with recompute.apply(model, inside) as handle:
        assert [attachment.path for attachment in handle._attachments] == [f"{path}.mlp.1" for path in expected]


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = SIZES | {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "ffn_dim", "attention_heads")}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}
SEGFORMER = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "num_attention_heads": [1, 2]}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2]}
MODELS = [
    ("GPT2Config", {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 32}, {"GPT2Block": 2}),
    ("BertConfig", TEXT, {"BertLayer": 2}),
    ("AlbertConfig", TEXT | {"embedding_size": 8}, {"AlbertLayer": 1}),  # that runs for each of its layers
    ("MambaConfig", TEXT, {"MambaBlock": 2}),
    ("MixtralConfig", TEXT | {"num_key_value_heads": 1, "num_local_experts": 2}, {"MixtralDecoderLayer": 2}),
    (
        "JambaConfig",
        TEXT | JAMBA | {"num_key_value_heads": 1},
        {"JambaMambaDecoderLayer": 1, "JambaAttentionDecoderLayer": 1},
    ),
    ("T5Config", {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2}, {"T5Block": 4}),
    ("BartConfig", BART | {"d_model": 16}, {"BartEncoderLayer": 2, "BartDecoderLayer": 2}),
    ("ViTConfig", SIZES, {"ViTLayer": 2}),
    ("SwinConfig", {"embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2]}, {"SwinLayer": 3}),
    ("ConvNextConfig", STAGES | {"num_stages": 2}, {"ConvNextLayer": 3}),
    ("ResNetConfig", STAGES | {"embedding_size": 8, "layer_type": "basic"}, {"ResNetBasicLayer": 3}),
    ("SegformerConfig", STAGES | SEGFORMER, {"SegformerLayer": 3}),
]


@pytest.mark.parametrize(("config", "sizes", "expected"), MODELS, ids=[config for config, *_ in MODELS])
def test_the_layers_of_transformers_models_are_their_blocks(config, sizes, expected):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config)(**sizes))
    found = [type(model.get_submodule(path)).__name__ for path in blocks(model)]
    assert {name: found.count(name) for name in found} == expected
