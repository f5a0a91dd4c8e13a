"""Makes the model and the batch of an estimate, both on fake tensors, from whatever the caller names them by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from recompute.engine.fake_mode import FakeMode
from recompute.errors import ModelError
from recompute.estimation.build_model import batch_of, build_fake, without_packing
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.factories import check_taken, describe
from recompute.estimation.fake_tensors import fake_batch, fake_copy
from recompute.estimation.static_memory import DTYPE_RECIPES


class ModelAndBatch(NamedTuple):
    """A model and a batch, both on fake tensors."""

    model: nn.Module
    batch: Any
    name: str

    def run(self) -> tuple[Tensor, Any]:
        if isinstance(self.batch, Mapping):
            output = self.model(**self.batch)
        else:
            output = self.model(*(self.batch if isinstance(self.batch, (tuple, list)) else (self.batch,)))
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss, output
        values = getattr(output, "to_tuple", lambda: output)()
        floats = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point()]
        if not floats:
            raise ModelError(f"{self.name}: expected a loss or tensors of floats; found {type(output).__name__}")
        return torch.stack([each.float().sum() if each.dim() else each for each in floats]).sum(), output


@contextmanager
def fake_model_and_batch(
    model: Any, options: EstimateOptions, batch_size: int, length: int, batch: Any
) -> Iterator[ModelAndBatch]:
    dtype = torch.float32 if DTYPE_RECIPES[options.dtype].parameter == 4 else torch.bfloat16
    if isinstance(model, nn.Module):
        name = type(model).__name__
        with without_packing(name), FakeMode():
            fake = fake_copy(model, dtype)
            if batch is not None:
                check_taken(model, batch, name)
                yield ModelAndBatch(fake, fake_batch(batch), name)
            elif hasattr(model, "config") and hasattr(model, "main_input_name"):
                given = batch_of(fake, name, length, batch_size, dtype, torch.device("cpu"))
                yield ModelAndBatch(fake, given, describe(fake, given))
            else:
                raise ModelError(f"{name}: what its forward is given is not known: pass batch, as in batch=(x,)")
        return
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, (str, PretrainedConfig)):
        raise ModelError(
            "expected an nn.Module, a configuration of transformers, a path or a name; "
            f"found {type(model).__name__}: {model!r}"
        )
    sizes: dict[str, Any] = {"sequence_length": length, "batch_size": batch_size, "dtype": dtype}
    with build_fake(model, device=torch.device("cpu"), **sizes) as (network, given):
        yield ModelAndBatch(network, given if batch is None else fake_batch(batch), describe(network, given))
