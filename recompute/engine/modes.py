"""Other people's ``TorchDispatchMode`` and ``TorchFunctionMode`` objects, which may change an op's result.

A mode that is in force in forward need not be in force in backward, nor the other way round. And nothing tells a mode
that counts ops from one that adds noise to them. So modes of torch and of this package are trusted; all others are
*foreign*, and nothing is assumed of them:

- A tape goes beneath foreign modes, where it sees the ops that they call.
- They do not see what the engine itself does with tensors.
- They see what runs again in backward, but their results of it are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.thread_state import local, swapped

_TRUSTED = ("torch.", "recompute.")

_C = torch._C
count_function_modes = _C._len_torch_function_stack
count_dispatch_modes = _C._len_torch_dispatch_stack


class SeesAllOps(TorchDispatchMode):
    """A mode of ours that sees each op of a region, also the ops of compiled code inside of it."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep ``torch.compile`` from taking the code for the user's, where it runs code that it has not compiled.

        ``torch._dynamo.eval_frame.skip_code`` does so, too, but would load the compiler.
        """
        super().__init_subclass__(**kwargs)
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch wraps ``__torch_dispatch__``, and each op takes a third longer to reach Python.

        It would load the compiler in a forward, too.
        """
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that code that is compiled inside of the region, as flex attention is, is still compiled."""
        return True


def dispatch_modes() -> list[Any]:
    """The dispatch modes in force, innermost last. torch's modes that lie beneath all others are left out."""
    modes = map(_C._get_dispatch_stack_at, range(count_dispatch_modes()))
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def function_modes() -> list[Any]:
    """The function modes in force, innermost last: ``torch.device`` and ``set_default_device`` are such."""
    return [_C._get_function_stack_at(index) for index in range(count_function_modes())]


def is_foreign(mode: Any) -> bool:
    """Whether a mode is neither torch's nor ours: nobody knows what it does to the ops that it sees."""
    return not type(mode).__module__.startswith(_TRUSTED)


def has_foreign_modes() -> bool:
    """Whether there is a foreign mode. It would see what the engine does with tensors, and might change it."""
    functions, ops = count_function_modes(), count_dispatch_modes()
    if not functions and not ops:
        return False
    modes = [_C._get_function_stack_at(index) for index in range(functions)]
    return any(map(is_foreign, modes + [_C._get_dispatch_stack_at(index) for index in range(ops)]))


def put_beneath(mode: Any) -> None:
    """Move a mode that was entered last to beneath the foreign ones."""
    modes = dispatch_modes()
    first = next((index for index, other in enumerate(modes) if is_foreign(other)), None)
    if first is not None:
        _put_dispatch_modes([*modes[:first], mode, *modes[first:-1]])


def put_on_top(mode: Any) -> None:
    """Move a mode back to where it was entered."""
    modes = dispatch_modes()
    if modes[-1] is not mode:
        _put_dispatch_modes([*(other for other in modes if other is not mode), mode])


def _put_dispatch_modes(modes: Sequence[Any]) -> None:
    for _ in dispatch_modes():
        _C._pop_torch_dispatch_stack(None)
    for mode in modes:
        _C._push_on_torch_dispatch_stack(mode)


def _put_function_modes(modes: Sequence[Any]) -> None:
    for _ in range(count_function_modes()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


@contextmanager
def under(dispatch: Sequence[Any], functions: Sequence[Any]) -> Iterator[None]:
    """Inside, only these modes are in force, and torch's modes that lie beneath all others."""
    present = dispatch_modes(), function_modes()
    _put_dispatch_modes(dispatch)
    _put_function_modes(functions)
    try:
        yield
    finally:
        _put_dispatch_modes(present[0])
        _put_function_modes(present[1])


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Inside, the engine itself works on tensors: only trusted modes see it or change it."""
    modes = dispatch_modes()
    hidden = [*local.hidden_modes, *filter(is_foreign, modes)]
    trusted = ([mode for mode in each if not is_foreign(mode)] for each in (modes, function_modes()))
    with under(*trusted), swapped(local, "hidden_modes", hidden):
        yield


_NOTHING: AbstractContextManager[None] = nullcontext()


def hidden_from_any_modes() -> AbstractContextManager[None]:
    """``hidden_from_modes`` if there are foreign modes; else nothing, which costs less."""
    return hidden_from_modes() if has_foreign_modes() else _NOTHING


def shown_to_modes() -> AbstractContextManager[None]:
    """Inside, something runs again: the foreign modes that ``hidden_from_modes`` hides see it."""
    return under([*dispatch_modes(), *local.hidden_modes], function_modes())


class ActiveModes:
    """The modes under which a frame runs, other than trusted dispatch modes."""

    __slots__ = ("_dispatch", "_functions")

    def __init__(self) -> None:
        self._dispatch = list(filter(is_foreign, dispatch_modes())) if count_dispatch_modes() else []
        self._functions = function_modes() if count_function_modes() else []

    def replayed(self) -> AbstractContextManager[None]:
        """Inside, these modes are in force again, beside the present ones, which see all of backward."""
        present = [*dispatch_modes(), *local.hidden_modes]
        missing = [mode for mode in self._dispatch if mode not in present]
        if not missing and not local.hidden_modes and self._functions == function_modes():
            return _NOTHING
        return self._under([*present, *missing])

    @contextmanager
    def _under(self, dispatch: Sequence[Any]) -> Iterator[None]:
        with swapped(local, "hidden_modes", []), under(dispatch, self._functions):
            yield
