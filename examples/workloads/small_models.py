"""The small models and batches that several workloads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 128


def llama(**changes: Any) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def text(batch: int = 2, length: int = 64) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch, length))
    return {"input_ids": ids, "labels": ids}


def image(size: int = 32, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


class Block(nn.Module):
    """A pre-norm MLP with dropout: (..., 32) -> (..., 32)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Convolutions(nn.Module):
    """Convolution, batch norm and an activation, twice: (batch, 8, height, width) -> the same."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.other(self.second(functional.relu(self.norm(self.first(x))))))


def blocks(count: int = 3, width: int = 32) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(count)))


def convolutions(count: int = 2, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *(Convolutions(width) for _ in range(count)))


def vectors(batch: int = 4, length: int = 8, width: int = 32) -> Tensor:
    return torch.randn(batch, length, width)


def squared(model: Callable[..., Tensor], batch: Callable[[], Tensor] = vectors) -> Callable[[], Tensor]:
    return lambda: model(batch()).pow(2).mean()
