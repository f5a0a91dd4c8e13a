"""Makes the model and the batch of an estimate, both on fake tensors, from whatever the caller names them by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from recompute.errors import ModelError
from recompute.estimation.adapt_model import adapting
from recompute.estimation.adapters import BASES
from recompute.estimation.build_model import build_fake, without_values
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.factories import call, check_taken, describe, loss_in, placed
from recompute.estimation.fake_tensors import fake_batch, fake_copy
from recompute.estimation.make_batch import batch_of, takes_images
from recompute.estimation.static_memory import DTYPE_RECIPES


class ModelAndBatch(NamedTuple):
    """A model and a batch, both on fake tensors."""

    model: nn.Module
    batch: Any
    name: str
    assumed: tuple[str, ...] = ()
    """Assumptions about the batch."""

    def run(self) -> tuple[Tensor, Any]:
        output = call(self.model, self.batch)
        return loss_in(output, self.name), output


@contextmanager
def on_fake_tensors(model: nn.Module, batch: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[nn.Module, Any]]:
    """A copy of a model, in training mode, and its batch on fake tensors, as ``fake_copy`` makes it. They run inside.

    Raises ``ModelError`` where the model asks inside for the value of a tensor.
    """
    with without_values(type(model).__name__):
        yield fake_copy(model, dtype), fake_batch(batch)


@contextmanager
def fake_model_and_batch(
    model: Any, options: EstimateOptions, batch_size: int, length: int, batch: Any
) -> Iterator[ModelAndBatch]:
    recipe, adapters = DTYPE_RECIPES[options.dtype], options.adapters
    dtype = torch.float32 if recipe.parameter == 4 else torch.bfloat16
    adapt = adapting(adapters, dtype, torch.bfloat16 if recipe.autocast else dtype)
    told = () if adapters is None or not adapters.base else (f"Linears of the base in {BASES[adapters.base]}",)
    with ExitStack() as stack:
        if isinstance(model, nn.Module):
            name = type(model).__name__
            if batch is not None:
                check_taken(model, batch, name)
            elif not (hasattr(model, "config") and hasattr(model, "main_input_name")):
                raise ModelError(f"{name}: a batch is missing. Pass forward's arguments, as in batch=(x,)")
            fake, given = stack.enter_context(on_fake_tensors(model, batch, adapt["dtype"]))
            if adapters is not None:
                fake = adapt["adapt"](fake)
            if batch is None:
                given = batch_of(fake, name, length, batch_size, dtype, torch.device("cpu"))
        else:
            model = os.fspath(model) if isinstance(model, os.PathLike) else model
            if not isinstance(model, (str, PretrainedConfig)):
                raise ModelError(
                    "expected an nn.Module, a configuration of transformers, a path or a name; "
                    f"found {type(model).__name__}: {model!r}"
                )
            sizes: dict[str, Any] = {"sequence_length": length, "batch_size": batch_size, **adapt}
            fake, given = stack.enter_context(build_fake(model, device=torch.device("cpu"), **sizes))
            given = given if batch is None else fake_batch(batch)
        given, assumed = (given, _made(fake, given)) if batch is None else _in_dtype(given, options)
        name = type(model).__name__ if batch is not None and isinstance(model, nn.Module) else describe(fake, given)
        yield ModelAndBatch(fake, given, name, (*told, *assumed))


def _in_dtype(batch: Any, options: EstimateOptions) -> tuple[Any, tuple[str, ...]]:
    """The batch with floats in the dtype of the recipe, as a training loop casts them, and the name of that."""
    recipe = DTYPE_RECIPES[options.dtype]
    floats = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.is_floating_point()]
    if recipe.parameter == 4 or all(each.dtype is torch.bfloat16 for each in floats):
        return batch, ()
    return placed(batch, dtype=torch.bfloat16, device=torch.device("cpu")), ("the batch's floats in bfloat16",)


def _made(model: nn.Module, batch: Any) -> tuple[str, ...]:
    """Which inputs were made for a model that takes more than tokens, and which were not."""
    if not isinstance(batch, Mapping):
        return ()
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and takes_images(config) and "pixel_values" not in batch:
        return ("tokens without images: pass batch for what the model is trained on",)
    return ("an image in each sequence",) if "pixel_values" in batch and "input_ids" in batch else ()
