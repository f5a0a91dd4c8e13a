"""The layouts of a call's arguments, as a key for decisions of ops about such a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

MAX_LAYOUTS = 128
"""The layouts of arguments that a function remembers."""

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling
_UNKNOWN = object()
_VALUES = (int, float, bool, str, type(None), torch.dtype)


def layouts_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """For each tensor everything but its address and values. All else, and tensor subclasses, stand for themselves."""
    return tuple(
        [
            (each.dtype, each.device, each.shape, each.stride())
            if type(each) is Tensor or type(each) is Parameter
            else each
            for each in arguments
        ]
    )


def once_by_layouts(decide: Callable[P, R]) -> Callable[P, R]:
    """``decide``, which runs once for arguments of the same layouts, and then gives the same result.

    For checks and choices that look at dtypes, devices, shapes and strides of tensors, and at no values. What it raises
    is raised each time. All arguments are given by position.
    """
    results: dict[Any, R] = {}

    @functools.wraps(decide)
    def decided(*arguments: Any) -> Any:
        if _is_compiling():
            return decide(*arguments)  # type: ignore[call-arg]
        try:
            layouts = layouts_of(arguments)
            known = results.get(layouts, _UNKNOWN)
        except (RuntimeError, TypeError):  # a sparse tensor has no strides, and a list no hash
            return decide(*arguments)  # type: ignore[call-arg]
        if known is not _UNKNOWN:
            return known
        result = decide(*arguments)  # type: ignore[call-arg]
        if all(type(each) is tuple or isinstance(each, _VALUES) for each in layouts):
            if len(results) >= MAX_LAYOUTS:
                results.clear()
            results[layouts] = result
        return result

    return decided  # type: ignore[return-value]
