"""Finds out which module runs.

In forward, calls of modules tell. In backward, it is the module whose forward made the autograd node that runs.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.thread_state import swapped
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.estimation.static_memory import ParameterShape

LOSS = "the loss"
"""The name of all code outside of a model's modules, as the loss is."""

_get_sequence = torch._C._autograd._get_sequence_nr
_NO_PLACE = 2**32  # a sequence number so far beyond the last node of forward is that of accumulation, not of forward


class ModuleTracker:
    """Tells which module of a model runs, by its path: "" is outside of all, and in the model's own forward."""

    def __init__(self) -> None:
        self.path = ""
        """The path of the module whose forward runs."""
        self.failed = ""
        """The path of the module in which the latest exception came up."""
        self.entered: Callable[[str], None] = lambda path: None
        """Called with the path of each module whose forward begins."""
        self.left: Callable[[], None] = lambda: None
        """Called when the forward of a module ends."""
        # The id of the exception that passes through the calls. The exception itself would hold their tensors.
        self._error: int | None = None
        self._borders = [0]
        self._paths = [""]
        self._last = ""

    def in_backward(self) -> str:
        """The path of the module whose backward runs in this thread, or ran last."""
        node = torch._C._current_autograd_node()
        sequence = 2**64 - 1 if node is None else node._sequence_nr()
        if 0 <= sequence < self._borders[-1] + _NO_PLACE:
            self._last = self._paths[bisect.bisect_right(self._borders, sequence) - 1]
        return self._last

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of the model's modules inside.

        Hooks on the modules would tell the same, but no kernel stands in for a module with hooks.
        """
        paths = {module: path for path, module in model.named_modules()}
        paths[getattr(model, "get_base_model", lambda: model)()] = ""  # inside of what PEFT wraps around it
        call = nn.Module.__call__

        def told(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(module)
            if path is None:
                return call(module, *args, **kwargs)
            around = self.path
            self._note_path(path)
            self._error = None
            self.entered(path)
            try:
                return call(module, *args, **kwargs)
            except BaseException as error:
                if id(error) != self._error:
                    self._error, self.failed = id(error), path
                raise
            finally:
                self.left()
                self._note_path(around)

        with swapped(nn.Module, "__call__", told):
            yield

    def _note_path(self, path: str) -> None:
        """A module's forward begins, or goes on after that of a module inside of it has ended."""
        self.path = path
        self._borders.append(_get_sequence())  # nodes from this number on are of this module
        self._paths.append(path)


@functools.cache
def unit_of(path: str) -> str:
    """The part of a model that ``path`` is in: a layer ("model.layers.3"), or a module outside of all layers."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else path or LOSS


def layer_of(path: str) -> str:
    """The layer that ``path`` is in; "" outside of all layers."""
    unit = unit_of(path)
    return unit if unit.split(".")[-1].isdigit() else ""


def parameter_shapes(model: nn.Module) -> list[ParameterShape]:
    """The shape of each parameter, with its layer. A shared parameter is listed once."""
    seen: dict[Tensor, ParameterShape] = {}
    for path, parameter in model.named_parameters():
        trains = parameter.requires_grad
        for each in inner_tensors(parameter) or (parameter,):  # of a quantized one, its codes and scales
            element = None if trains else each.element_size()
            seen[each] = ParameterShape(tuple(each.shape), trains, layer_of(path), element)
    return list(seen.values())
