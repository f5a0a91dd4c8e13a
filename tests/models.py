"""Tiny models of many families, built from configurations without a download, and batches for each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 32, 48, 2, 64
BATCH, LENGTH = 2, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
GPT2_SHAPE = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VIT_SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "image_size": 24, "patch_size": 4, "num_labels": VOCABULARY,
}  # fmt: skip
WHISPER_SHAPE = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": INTERMEDIATE, "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5_SHAPE = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": INTERMEDIATE, "num_layers": LAYERS,
    "num_heads": 4, "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip


class ConvBlock(nn.Module):
    """Two convolutions with batch norm and a skip around them, as in a ResNet, and dropout of channels."""

    def __init__(self, channels, dropout):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x):
        y = self.activation(self.norm1(self.conv1(x)))
        y = self.dropout(self.norm2(self.conv2(y)))
        y += x
        return self.activation(y)


class ConvNet(nn.Module):
    def __init__(self, channels=8, dropout=0.0):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(channels, dropout) for _ in range(LAYERS)))
        self.head = nn.Linear(channels, VOCABULARY)

    def forward(self, pixel_values, labels):
        logits = self.head(self.blocks(self.stem(pixel_values)).mean((-2, -1)))
        return ImageClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)


def token_batch(generator, size, length):
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def image_batch(generator, size, length):
    images = torch.randn(size, 3, 24, 24, generator=generator)
    return {"pixel_values": images, "labels": torch.arange(size)}


def speech_batch(generator, size, length):
    features = torch.randn(size, 8, 64, generator=generator)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (size, length), generator=generator)}


@dataclass(frozen=True)
class Family:
    """``layers`` are the class names of its layers, ``dropout`` the options that make it draw random numbers."""

    build: Callable[..., nn.Module]
    layers: tuple[str, ...]
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)
    dropout: dict[str, float] = field(default_factory=lambda: {"attention_dropout": 0.1})
    batch: Callable[[torch.Generator, int, int], dict[str, Tensor]] = token_batch


def configured(model, config):
    """The Hugging Face model of that class name, from options of its configuration."""
    return lambda **options: getattr(transformers, model)(getattr(transformers, config)(**options))


def decoder(family, text="", **options):
    build = configured(f"{family}ForCausalLM", f"{family}{text}Config")
    return Family(build, (f"{family}DecoderLayer",), SHAPE | options)


FAMILIES = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "gemma": decoder("Gemma"),
    "gemma2": decoder("Gemma2"),
    "gemma3": decoder("Gemma3", "Text"),
    "phi3": decoder("Phi3"),
    "mixtral": decoder("Mixtral", num_local_experts=4, router_jitter_noise=0.1, **EXPERTS),
    "qwen3_moe": decoder("Qwen3Moe", num_experts=4, **EXPERTS),
    "gpt2": Family(configured("GPT2LMHeadModel", "GPT2Config"), ("GPT2Block",), GPT2_SHAPE,
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "bert": Family(configured("BertForMaskedLM", "BertConfig"), ("BertLayer",),
        dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
    "vit": Family(configured("ViTForImageClassification", "ViTConfig"), ("ViTLayer",), VIT_SHAPE,
        {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}, image_batch),
    "whisper": Family(configured("WhisperForConditionalGeneration", "WhisperConfig"),
        ("WhisperEncoderLayer", "WhisperDecoderLayer"), WHISPER_SHAPE,
        {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}, speech_batch),
    "t5": Family(configured("T5ForConditionalGeneration", "T5Config"), ("T5Block",), T5_SHAPE, {"dropout_rate": 0.1}),
    "convnet": Family(ConvNet, ("ConvBlock",), {}, {"dropout": 0.1}, image_batch),
}  # fmt: skip

transformers.logging.set_verbosity_error()


def make(name, dtype=torch.float32, **options):
    """The model of that family, in training, always with the same weights."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build(**{**family.shape, **options}).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1  # norms that are the identity hide mistakes
    return model.to(dtype)


def batch(name, seed=0, size=BATCH, length=LENGTH):
    return FAMILIES[name].batch(torch.Generator().manual_seed(seed), size, length)


LAYERS_BY_KERNELS = {
    "version": 1,
    "name": "layers",
    "rules": [
        {"type": ["*DecoderLayer", "*RMSNorm"], "action": "recompute", "via": "kernel"},
        {"match": "lm_head", "action": "recompute", "via": "kernel"},
    ],
}


def held(model, run):
    """Bytes of distinct storages that autograd holds after ``run``, other than parameters', as an outer hook sees."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    alive = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in alive)
