"""Builds the model that a file describes, and a batch for it: real, or of fake tensors, which take no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.initialization import no_init_weights

from recompute.counters import resolve_device
from recompute.engine.fake_mode import FakeMode
from recompute.engine.numerics import default_dtype
from recompute.engine.thread_state import is_fake, swapped
from recompute.errors import ModelError
from recompute.estimation.adapt_model import adapting
from recompute.estimation.adapters import Adapters
from recompute.estimation.check_paths import check_source, names_factory
from recompute.estimation.factories import load_factory, make, placed
from recompute.estimation.fake_tensors import modules_move
from recompute.estimation.llama import ModelFile, ModelShape
from recompute.estimation.make_batch import batch_of
from recompute.files import user_path
from recompute.policy.document import load_document

Source = str | transformers.PretrainedConfig | ModelShape


def build(
    source: Source,
    *,
    sequence_length: int,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> tuple[nn.Module, Any]:
    """A model in training mode with random weights, and random keyword arguments for it, with labels if it takes any.

    source: one of

        - an ablation's configuration file (YAML): its section ``model`` counts; or that section,
        - a Hugging Face configuration, its ``config.json``, the folder of that, or the name of the model,
        - ``package.module:factory``, a function that returns a model and a batch, whose sizes are its own.
    sequence_length: token ids are (batch_size, sequence_length). Where the configuration has fewer positions, the model
        gets as many.
    seed: of the weights, and of the batch.
    adapt: given the model, returns the one to train in its place, as ``adapt_model.adapted`` does.

    Leaves the global random state as it was. Raises ``PolicyError`` for a configuration that is not valid, and
    ``ModelError`` where there is none, or the model takes neither tokens nor images.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if isinstance(source, str) and names_factory(source):
            model, batch = _of_factory(source, dtype, device)
        else:
            if isinstance(source, str) and source.endswith((".yaml", ".yml")):
                source = load_document(ModelFile, source, kind="configuration").model
            given = source.config(sequence_length) if isinstance(source, ModelShape) else source
            model = _hugging_face(given, dtype, device, sequence_length)
            if given is not source:
                torch.manual_seed(seed)  # so that an ablation's batch is the same whatever the model's shape
            batch = batch_of(model, _called(source), sequence_length, batch_size, dtype, device)
        if is_fake() and isinstance(model, transformers.PreTrainedModel):
            model.tie_weights()  # initializing would have done this
        return adapt(model), batch


def build_options(
    *, seq_len: int, batch_size: int, dtype: str, device: str, adapters: Adapters | None = None
) -> dict[str, Any]:
    """The options of ``build`` by those of a command line, where dtype and device are names ("auto": CUDA if any)."""
    trained = getattr(torch, dtype)
    return {
        "sequence_length": seq_len,
        "batch_size": batch_size,
        "device": resolve_device(device),
        **adapting(adapters, trained, trained),
    }


@contextmanager
def build_fake(source: Source, *, device: torch.device, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """What ``build`` returns, on fake tensors: inside, the model runs, computes nothing and needs no memory.

    Raises ``ModelError`` where the model asks inside for the value of a tensor.
    """
    with without_values(_called(source)):
        with no_init_weights():  # initializing some models asks for the values of tensors
            model, batch = build(source, device=torch.device("cpu"), **options)
        if device.type != "cpu":  # not earlier: CUDA's random state cannot be saved and put back under fake tensors
            model.to(device)
            batch = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), batch)
        yield model, batch


@contextmanager
def without_values(name: str) -> Iterator[None]:
    """Inside, tensors are fake. Hugging Face's attention treats their positions like those of a single sequence.

    Raises ``ModelError`` where the model, called ``name``, asks inside for the value of a tensor.
    """
    # It cannot tell from fake positions, and would assume several sequences in a row, whose mask changes saved tensors.
    positions_told = swapped(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    try:
        with positions_told, FakeMode(), modules_move():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{name}: its forward depends on the values of tensors, which are not known here ({error}). Apply the "
            "policy to the real model, run forward, and print the handle's explain()"
        ) from error


def _of_factory(name: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Any]:
    model, batch = make(load_factory(name), name, dtype=dtype, device=device)
    if batch is None:
        raise ModelError(
            f"{name}: expected it to return (model, batch); found a model alone, and forward needs a batch"
        )
    return model, placed(batch, dtype=dtype, device=device)


def _called(source: Source) -> str:
    return source if isinstance(source, str) else type(source).__name__


def _hugging_face(
    source: str | transformers.PretrainedConfig, dtype: torch.dtype, device: torch.device, positions: int
) -> nn.Module:
    config = _read(source) if isinstance(source, str) else copy.deepcopy(source)
    text = config.get_text_config()
    config.dtype = dtype
    text.use_cache = False
    if positions > (getattr(text, "max_position_embeddings", None) or positions):
        text.max_position_embeddings = positions
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    make: Any = next(filter(None, classes), transformers.AutoModelForCausalLM.from_config)
    with default_dtype(dtype), device, refusals_named(source):
        return make(config).train()


def _read(source: str) -> transformers.PretrainedConfig:
    check_source(source)
    with refusals_named(source):
        return transformers.AutoConfig.from_pretrained(str(user_path(source)))


@contextmanager
def refusals_named(source: Source) -> Iterator[None]:
    """Raise ``ModelError`` with the configuration's name and a line for whatever transformers raises."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # transformers checks some values. Others lead to errors anywhere in its code, so any exception may come.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        told = (lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]).rstrip(".")
        kind = "" if isinstance(error, (OSError, ValueError)) or len(lines) > 1 else f"{type(error).__name__}: "
        if isinstance(error, OSError) and isinstance(source, str) and not user_path(source).exists():
            raise ModelError(
                f"{source}: no file or folder has this name, and transformers did not fetch a model of this name: "
                f"{told}. Give a name that Hugging Face knows, or the path of a config.json"
            ) from error
        raise ModelError(
            f"{_called(source)}: transformers {transformers.__version__} cannot build a model from this "
            f"configuration: {kind}{told}. Correct it, or give the path of another config.json"
        ) from error
