"""Models of one kind of operation at any size, for ``package.module:factory``:

    examples.ablation.study.operations:norm_8192x4096     # four RMSNorms of 8192 tokens, 4096 wide
    examples.ablation.study.operations:mlp_8192x4096      # two SwiGLU MLPs

The input is a parameter, so that backward goes through every operation. So the optimizer's step updates it, too: read
the times of forward and backward, not those of whole steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class Norms(nn.Module):
    """RMSNorms, each of the one before."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, tokens, width))
        self.norms = nn.ModuleList(LlamaRMSNorm(width) for _ in range(4))

    def forward(self, scale: Tensor) -> Tensor:
        x = self.tokens
        for norm in self.norms:
            x = norm(x)
        return (x * scale).mean()


class MLPs(nn.Module):
    """SwiGLU MLPs with their projections, each added to the stream."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=width, intermediate_size=width * 7 // 2, num_attention_heads=1)
        self.tokens = nn.Parameter(torch.randn(1, tokens, width))
        self.mlps = nn.ModuleList(LlamaMLP(config) for _ in range(2))

    def forward(self, scale: Tensor) -> Tensor:
        x = self.tokens
        for mlp in self.mlps:
            x = x + mlp(x)
        return (x * scale).mean()


_KINDS = {"norm": Norms, "mlp": MLPs}


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, Tensor]]:
    """The factory that a name such as ``norm_8192x4096`` asks for."""
    match = re.fullmatch(r"([a-z]+)_(\d+)x(\d+)", name)
    if match is None or match[1] not in _KINDS:
        raise AttributeError(f"expected a name such as norm_8192x4096 or mlp_8192x4096; found {name!r}")

    def make() -> tuple[nn.Module, Tensor]:
        model = _KINDS[match[1]](int(match[2]), int(match[3]))
        return model, torch.linspace(-1, 1, int(match[3]))

    return make
