"""Modules that need PyTorch alone: recurrent ones, transformers, parametrizations, experts, a straight-through step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_models import Block, blocks, convolutions, image, squared, vectors
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from workload import Run, workload


def define(name: str, make: Callable[[], nn.Module], batch: Callable[[], Tensor] = vectors) -> None:
    @workload("torch", name)
    def train(run: Run) -> None:
        model = run.govern(make())
        run.train(model, squared(model, batch))


def parametrized(how: Callable[..., nn.Module]) -> nn.Module:
    model = blocks()
    for block in model:
        how(block.up)
        how(block.down)
    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(0)) / 2


class Recurrent(nn.Module):
    """A recurrent layer with a norm around it: (batch, length, 32) -> the same."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.recurrent = nn.LayerNorm(32), kind(32, 32, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(self.norm(x))[0]


class Tied(nn.Module):
    """Two blocks that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].up.weight = self.layers[0].up.weight
        self.layers[1].down = self.layers[0].down

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LayerDrop(nn.Module):
    """Blocks, each of which is skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) > 0.4:
                x = layer(x)
        return x


class Router(nn.Module):
    """A mixture of experts by index_add, whose experts get other tokens in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 32)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        total = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            total = total.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return total.view_as(x)


class Quantizer(nn.Module):
    """Vector quantization between two blocks: a straight-through estimator, and a codebook that follows by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()
        self.register_buffer("codes", torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        chosen = torch.cdist(h.reshape(-1, 32), self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                counts = torch.bincount(chosen, minlength=16).clamp(min=1)
                sums = torch.zeros_like(self.codes).index_add_(0, chosen, h.reshape(-1, 32))
                self.codes.lerp_(sums / counts[:, None], 0.1)
        quantized = self.codes[chosen].view_as(h)
        return self.decoder(h + (quantized - h).detach()) + (h - quantized.detach()).pow(2)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(Block):
    """A block whose activation is an ``autograd.Function``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(StraightThrough.apply(self.up(self.norm(x))))


define("pre-norm blocks", blocks)
define("convolutions with batch norm", convolutions, image)
define("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2))
define("TransformerEncoder, norm first", lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False))
define("LSTM", lambda: nn.Sequential(*(Recurrent(nn.LSTM) for _ in range(2))))
define("GRU", lambda: nn.Sequential(*(Recurrent(nn.GRU) for _ in range(2))))
define("spectral norm", lambda: parametrized(parametrizations.spectral_norm))
define("spectral norm by a hook", lambda: parametrized(nn.utils.spectral_norm))
define("weight norm", lambda: parametrized(parametrizations.weight_norm))
define("weight norm by a hook", lambda: parametrized(nn.utils.weight_norm))
define("orthogonal weights", lambda: parametrized(parametrizations.orthogonal))
define(
    "a parametrization of one's own",
    lambda: parametrized(lambda linear: parametrize.register_parametrization(linear, "weight", Symmetric())),
)
define("weights that blocks share", Tied)
define("blocks that are skipped at random", LayerDrop)
define("a mixture of experts", lambda: nn.Sequential(Router(), Router()))
define("vector quantization with averages", Quantizer)
define("autograd.Function with a straight-through gradient", lambda: nn.Sequential(*(Binary() for _ in range(3))))
define("group norm and SiLU", lambda: nn.Sequential(*(grouped() for _ in range(2))), lambda: torch.randn(2, 8, 16, 16))


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)


def grouped() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))


@workload("torch", "TransformerDecoder with a mask")
def decoder(run: Run) -> None:
    model = run.govern(nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2))
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    run.train(model, lambda: model(vectors(), vectors(length=5), tgt_mask=mask).pow(2).mean())
