"""MLPs whose Linears have adapters, over some tokens at a time: for long sequences.

No kernel computes such an MLP. So the module's own code runs, on one tile of tokens after the other, and again in
backward. Only the MLP's input is held, and no intermediate tensor of all tokens ever exists.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recompute.compiled.runner import Forward
from recompute.engine.numerics import autocast_again, autocast_in_force
from recompute.engine.reachable_objects import base_of
from recompute.kernels.linears import rows, shaped
from recompute.kernels.mlp_ops import gradients_of_tiles
from recompute.substitution.feed_forward import find_kernel_mlp
from recompute.substitution.kernel_runner import KernelRunner, is_hooked, only_argument

_BY_ROWS = (nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""The parts that an adapter may have, so that it computes each row of its input by itself."""


class _InTiles(torch.autograd.Function):
    """Runs ``run`` on tiles of rows. ``parameters`` are those that it trains."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], tile: int, *parameters: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.tile, ctx.autocast = run, tile, autocast_in_force()
        y = torch.cat([run(part) for part in rows(x).split(tile)])
        return shaped(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, *parameters = ctx.saved_tensors

        def run(part: Tensor) -> Tensor:
            with autocast_again(ctx.autocast):
                return ctx.run(part)

        dx, gradients = gradients_of_tiles(run, x, dy, ctx.tile, ctx.needs_input_grad[0], parameters)
        return dx, None, None, *gradients


@dataclass
class AdaptedMLPRunner(KernelRunner):
    drops: bool
    """Whether its adapters draw random numbers where they train."""
    has_mlp = True

    def _what(self) -> str:
        told = "all tokens at once, as its adapters drop" if self.drops else f"{self.tile:,} tokens at a time"
        return f"an MLP with adapters, {told}"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        tile, parameters = self.tile, [each for each in module.parameters() if each.requires_grad]
        if tile is None or drops(module) or torch.compiler.is_compiling():
            return forward(*args, **kwargs)  # tiles would draw other random numbers than all tokens at once

        def in_tiles(x: Tensor) -> Tensor:
            return _InTiles.apply(x, forward, tile, *parameters)

        # Equal layers are of one kind. A kind names no module: that would live as long as the counts.
        shapes = tuple([(each.shape, each.dtype, each.requires_grad) for each in module.parameters()])
        kind = base_of(module), tile, tuple(map(type, module.modules())), shapes
        return self.compute(kind, only_argument(args, kwargs), parameters, in_tiles, forward)


def drops(module: nn.Module, *, is_training: bool = False) -> bool:
    """Whether a Dropout in ``module`` draws random numbers now, or, if ``is_training``, where it trains."""
    dropouts = (each for each in module.modules() if isinstance(each, nn.Dropout))
    return any(each.p > 0 and (each.training or is_training) for each in dropouts)


def is_adapted_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is an MLP that kernels would compute if its Linears had no adapters.

    An adapter is a module with the Linear as its ``base_layer``, as PEFT has it. The Linear may be quantized.
    """
    bare, adapted = copy.copy(module), False
    bare._modules = dict(module._modules)
    for name, child in module._modules.items():
        base = getattr(child, "base_layer", None)
        if child is None or not isinstance(base, nn.Linear):
            continue
        parts = [each for each in child.modules() if each is not child]
        if is_hooked(child) or not all(isinstance(each, _BY_ROWS) for each in parts):
            return False
        bare._modules[name] = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
        adapted = True
    return adapted and not is_hooked(module) and find_kernel_mlp(bare) is not None
