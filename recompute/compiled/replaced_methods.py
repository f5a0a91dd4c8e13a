"""Other methods in the place of those of torch's frontend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts what it decorates in the place of a method of torch's frontend. It is given the method first."""
    method = getattr(owner, name)

    def put(replacement: Callable[..., Any]) -> None:
        @functools.wraps(method)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(method, *args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if is_static else replaced)

    return put
