"""Models of the caller's own: a function that makes one, by itself or by its name, and the batch that goes with it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves, tree_map_only

from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import ModelError, RecomputeError
from recompute.estimation.quantized_linear import packed_numbers

Factory = Callable[[], Any]
"""Returns an ``nn.Module``, or a pair of that and a batch: a tensor, a tuple of arguments or a mapping of keywords."""


def load_factory(name: str) -> Factory:
    """The function that ``package.module:factory`` names. Modules in the current folder are found, too.

    Raises ``ModelError`` where the module cannot be found or has no such function. Errors that the module raises when
    it is imported pass through.
    """
    module_name, _, attributes = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # `python -m` puts it there, a console script does not
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module itself imports the missing one
        raise ModelError(
            f"{name}: there is no module {error.name}, neither installed nor below {folder}; expected "
            "package.module:factory"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ModelError(f"{name}: {module_name} has no {attributes}; expected the name of a function in it")
        found = getattr(found, attribute)
    return check_factory(found, name)


def check_factory(factory: Any, name: str) -> Factory:
    """Return ``factory`` if it can be one, or raise a ``ModelError`` that calls it ``name``."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ModelError(
            f"{name}: expected a function without arguments that returns a new model, or (model, batch); found "
            f"{_kind(factory)}"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # it tells none
        return factory
    try:
        signature.bind()
    except TypeError as error:
        raise ModelError(
            f"{name}: expected a function without arguments that returns a model, or (model, batch); {error}"
        ) from error
    return factory


def make(
    factory: Factory, name: str, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[nn.Module, Any]:
    """The model in training mode, and the batch that the factory gives with it, or None.

    dtype: for the model's floating-point parameters and buffers; None to leave them as they are.
    device: they are made there, and moved there if the factory makes them elsewhere.

    Raises ``ModelError`` where the factory raises, gives something else, or gives a batch that forward does not take.
    """
    with torch.device("cpu") if device is None else device, _failures_named(factory, name):
        made = factory()
    pair = isinstance(made, (tuple, list)) and len(made) == 2
    model, batch = made if pair else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: expected it to return an nn.Module, or (nn.Module, batch); found {_kind(made)}")
    if batch is not None:
        batch = check_batch(batch, name)
        check_taken(model, batch, name)
    return model._apply(partial(_place, dtype=dtype, device=device)).train(), batch


@contextmanager
def _failures_named(factory: Factory, name: str) -> Iterator[None]:
    """Raise ``ModelError`` with the line of the factory's own file for whatever it raises."""
    try:
        yield
    except (RecomputeError, torch.OutOfMemoryError, DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception as error:  # the factory is the caller's code, so any exception may come
        frames = extract_tb(error.__traceback__)
        code = getattr(inspect.unwrap(factory), "__code__", None)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        where = (own or frames)[-1]
        raise ModelError(
            f"{name}: expected it to return a model, or (model, batch); it raised {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno}). Call it by itself to see the whole traceback"
        ) from error


def check_taken(model: nn.Module, batch: Any, name: str) -> None:
    """Raise ``ModelError`` where forward's signature does not take the batch."""
    if type(model).__call__ is not nn.Module.__call__ or model._forward_pre_hooks:
        return  # what forward is given in the end is not known
    try:
        signature = inspect.signature(model.forward, follow_wrapped=False)  # a wrapper may take more than it passes on
    except (TypeError, ValueError):  # it tells none
        return
    try:
        call(signature.bind, batch)
    except TypeError as error:
        given = f"the keywords {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "a batch by position"
        raise ModelError(
            f"{name}: expected a batch for the forward of {type(model).__name__}, forward{signature}; found {given}: "
            f"{error}"
        ) from error


def check_batch(batch: Any, name: str) -> Any:
    if isinstance(batch, (Tensor, Mapping)) or (isinstance(batch, (tuple, list)) and len(batch)):
        return tuple(batch) if isinstance(batch, list) else batch
    raise ModelError(
        f"{name}: expected a batch that is a tensor, a tuple of arguments or a mapping of keyword arguments; found "
        f"{_kind(batch)}"
    )


def placed(batch: Any, *, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The batch on a device. dtype: for its tensors of floats; None to leave them as they are."""
    return tree_map_only(Tensor, partial(_place, dtype=dtype, device=device), batch)


def _place(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    is_cast = tensor.is_floating_point() and not inner_tensors(tensor)  # ``to`` may undo that one is quantized
    return tensor.to(device=device, dtype=dtype if is_cast else None)


def call(model: Any, batch: Any) -> Any:
    """Call the model with a batch: keyword arguments, a tuple of arguments, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def describe(model: nn.Module, batch: Any, where: str = "") -> str:
    """A line on the model and the batch. where: how it ends, as "on cuda"; by default with the model's device."""
    parameters = list(model.parameters())
    named = batch if isinstance(batch, Mapping) else {"": batch}
    shapes = [
        f"{name} {'x'.join(map(str, each.shape))}".lstrip()
        for name, value in named.items()
        for each in tree_leaves(value)
        if isinstance(each, Tensor)
    ]
    count = sum(parameter.numel() for parameter in parameters) + packed_numbers(model)
    dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else ""
    where = where or (f"on {parameters[0].device.type}" if parameters else "")
    told = " ".join(filter(None, (dtype, where)))
    name = type(getattr(model, "get_base_model", lambda: model)()).__name__  # PEFT wraps models
    return f"{name}, {count:,} parameters{told and f', {told}'}; {', '.join(shapes)}"


def own_loss(output: Any) -> Tensor | None:
    """The ``loss`` that an output has as an attribute or a key."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    return loss if isinstance(loss, Tensor) else None


def loss_in(output: Any, name: str) -> Tensor:
    """The ``loss`` that an output has as an attribute or a key; else the sum of its tensors of floats.

    Raises ``ModelError`` where there is neither, or the loss is no scalar.
    """
    if (loss := own_loss(output)) is not None:
        if loss.numel() != 1:
            raise ModelError(f"{name}: expected a loss of one number; found one of shape {tuple(loss.shape)}")
        return loss
    values = getattr(output, "to_tuple", lambda: output)()
    floats = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point()]
    sums = [each.sum(dtype=torch.promote_types(each.dtype, torch.float32)) for each in floats if each.requires_grad]
    if not sums:
        raise ModelError(
            f"{name}: expected forward to return a loss, an object with one, or tensors of floats that depend on the "
            f"parameters; found {_kind(output)}"
        )
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return type(value).__name__
