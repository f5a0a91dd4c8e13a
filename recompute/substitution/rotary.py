"""Rotary embeddings: the function that attention calls is recognized by trials, and ``kernels.rope`` stands in for it.

Attention calls the function that rotates queries and keys by a global name. For ours to stand in, forward is copied
with other globals: a mapping that asks the module's own globals at each look-up, and answers with ours where it finds
the very function that was recognized.

Why is the name not rebound in the module while attention runs, as ``unittest.mock.patch`` would?

1. All threads share a module's globals: another thread, whose attention may be under no policy, would call ours.
2. ``torch.compile`` and captured regions guard the globals that their graphs read: calls in other threads would miss
   these guards in the meantime, and be traced again.
3. Where two calls overlap in time, the first to end would take ours away from the other, and change its values.

The copy shares nothing that changes. Its limits: it relies on CPython, which looks globals up by ``__getitem__`` where
they are not exactly a dict. And a forward that assigns globals, asks for all of them, or has a helper rotate is left
alone.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recompute.compiled.runner import Forward
from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.rng import RngState
from recompute.engine.thread_state import local
from recompute.errors import KernelError
from recompute.substitution.kernel_runner import CreditedTo, KernelRunner
from recompute.substitution.module_formula import is_decorated


@dataclass(frozen=True)
class Rotary:
    """A forward that rotates queries and keys, and its copy in which ``recompute.kernels.rope`` does."""

    name: str
    """Of the function that ours stands in for, as the forward calls it."""
    forward: Forward
    copy: FunctionType
    original: Forward
    """That function."""
    stand_in: Forward
    """Ours, in its place."""

    def bind(self, module: nn.Module, forward: Forward) -> Forward:
        """What to call in the place of ``forward``, a bound method of ``module``.

        That is ``forward`` itself where it is no longer the one that was copied. Under a compiler it is, too: it fuses
        the rotation anyway, and would take the copy's globals for the original's.
        """
        if torch.compiler.is_compiling() or getattr(forward, "__func__", None) is not self.forward:
            return forward
        return MethodType(self.copy, module)


def find_rotary(module: nn.Module, *, on_cuda_only: bool = False) -> Rotary | None:
    """How ``module`` runs forward with ``rope`` in place, if its class's forward calls one function that rotates.

    ``rope`` then runs where it can compute what the function would (other shapes and dtypes go to the function), and
    with ``on_cuda_only`` only on CUDA.
    """
    forward = base_of(module).forward
    function = inspect.unwrap(forward)
    if is_decorated(module) or not isinstance(function, FunctionType):
        return None  # a decorated class's forward runs the policy's runner, not the other way round
    namespace = function.__globals__
    names = _global_names(function.__code__)
    found = {name: is_partial for name in names if (is_partial := _rotates(namespace.get(name))) is not None}
    if len(found) != 1:
        return None
    ((name, is_partial),) = found.items()
    original = namespace[name]
    stand_in = _stand_in(original, is_partial, on_cuda_only)
    copy = _copy_with_globals(forward, _GlobalsButOne(namespace, original, stand_in))
    return None if copy is None else Rotary(name, forward, copy, original, stand_in)


@dataclass
class KernelRotaryRunner(KernelRunner):
    """Attention runs its own forward, in which another function rotates."""

    rotary: Rotary
    stands_in_for_parts = True

    @property
    def substitutes(self) -> dict[Forward, Forward]:
        """What forward calls, and what is called in its place: for a graph of the region around it."""
        return {self.rotary.original: self.rotary.stand_in}

    def _what(self) -> str:
        return f"rope, as {self.rotary.name}"

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        return True  # the function asks where its queries are

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with CreditedTo(self.statistics):
            output = self.rotary.bind(module, forward)(*args, **kwargs)
        self.held.count_run()
        return output


class _GlobalsButOne(dict[str, Any]):
    """A module's globals as they are at each look-up, but for one value, in whose place another stands.

    A function's globals must be a dict. Where they are of a subclass, names are looked up by its ``__getitem__``. What
    the interpreter reads without ``__getitem__``, as for an import, is in the dict itself.
    """

    def __init__(self, namespace: dict[str, Any], original: Any, stand_in: Any):
        super().__init__({name: value for name, value in namespace.items() if name.startswith("__")})
        self._namespace = namespace
        self._original = original
        self._stand_in = stand_in

    def __getitem__(self, name: str) -> Any:
        value = self._namespace[name]
        return self._stand_in if value is self._original else value


@functools.lru_cache(1024)
def _global_names(code: CodeType) -> frozenset[str]:
    """The globals that the code, and what is defined in it, looks up by name; none if it needs its very own globals."""
    instructions = [instruction for part in _nested(code) for instruction in dis.get_instructions(part)]
    names = frozenset(instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL")
    needs_own = any(instruction.opname in _NEEDS_A_PLAIN_DICT for instruction in instructions)
    return frozenset() if needs_own or names & {"globals", "eval", "exec"} else names


_NEEDS_A_PLAIN_DICT = {"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""Instructions that read or write globals without ``__getitem__``; the last two are those of a class body."""


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _copy_with_globals(function: Any, namespace: dict[str, Any]) -> FunctionType | None:
    """A copy of a function with other globals, inside of copies of the decorators around it.

    None where a decorator does not plainly hold what it decorates: once, in its closure.
    """
    if not isinstance(function, FunctionType):
        return None
    attributes, closure = dict(vars(function)), function.__closure__ or ()
    if hasattr(function, "__wrapped__"):
        inner = _copy_with_globals(function.__wrapped__, namespace)
        holds = [cell != CellType() and cell.cell_contents is function.__wrapped__ for cell in closure]
        if inner is None or sum(holds) != 1:
            return None
        closure = tuple(CellType(inner) if held else cell for held, cell in zip(holds, closure, strict=True))
        namespace, attributes["__wrapped__"] = function.__globals__, inner
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(copy).update(attributes)
    return copy


def _stand_in(original: Any, is_partial: bool, on_cuda_only: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        from recompute.kernels.rope import rope

        takes_width = is_partial or cos.shape[-1] == q.shape[-1]
        if takes_width and (q.is_cuda or local.simulates_cuda or not on_cuda_only) and _is_as_written(original):
            try:
                return rope(q, k, cos, sin, *args, **kwargs)
            except KernelError:
                pass  # shapes or dtypes that only the original takes, or refuses in its own words
        return original(q, k, cos, sin, *args, **kwargs)

    return rotate


def _is_as_written(function: Any) -> bool:
    """Not if it is one that Hugging Face's ``kernels`` made a module of, and has put a kernel of its own into since."""
    return isinstance(function, FunctionType) or (isinstance(function, nn.Module) and "forward" not in vars(function))


_known: weakref.WeakKeyDictionary[Any, bool | None] = weakref.WeakKeyDictionary()


def _rotates(function: Any) -> bool | None:
    """None if ``function`` does not compute what ``rope`` does: by how it is called, then by trials on small tensors.

    Otherwise, whether it also takes angles for the first columns alone, and passes on the others.
    """
    if not _is_as_written(function) or (unsqueeze_dims := _unsqueeze_dims(function)) is None:
        return None
    if function not in _known:
        _known[function] = _tried(function, unsqueeze_dims)
    return _known[function]


def _unsqueeze_dims(function: Any) -> list[tuple[int, ...]] | None:
    """What to give a function after (q, k, cos, sin) to try it; None for one that is called otherwise."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):  # it has none, or one that makes no sense
        return None
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if required != ["q", "k", "cos", "sin"] or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        return None
    match list(parameters.values())[4:]:
        case []:
            return [()]
        case [inspect.Parameter(name="unsqueeze_dim", default=1)]:
            return [(), (1,), (2,)]
    return None


def _tried(function: Any, unsqueeze_dims: list[tuple[int, ...]]) -> bool | None:
    with _disable_current_modes(), RngState().replayed(), torch.inference_mode(False), torch.enable_grad():
        whole = all(_agrees(function, 8, angles, dim) for angles in (1, 2) for dim in unsqueeze_dims)
        return _agrees(function, 6, 1, ()) if whole and _promotes(function) else None


def _agrees(function: Any, rotated: int, angles: int, unsqueeze_dim: tuple[int, ...]) -> bool:
    """Whether outputs and gradients are the reference's but for rounding, in float64, and no input is changed."""
    from recompute.kernels.rope import rope_reference

    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()

    q, k = (make(2, 3, heads, 8) if unsqueeze_dim == (2,) else make(2, heads, 3, 8) for heads in (4, 2))
    inputs = (q, k, make(angles, 3, rotated), make(angles, 3, rotated))
    directions = (make(*q.shape), make(*k.shape))
    try:
        outputs = function(*inputs, *unsqueeze_dim)
        gradients = torch.autograd.grad(outputs, inputs, directions)
    except Exception:
        # A user's function may raise anything at shapes that it was not written for: it is not recognized.
        return False
    expected = rope_reference(*inputs, *unsqueeze_dim)
    wanted = torch.autograd.grad(expected, inputs, directions)
    return (
        isinstance(outputs, tuple)
        and all(map(_same_but_for_rounding, (*outputs, *gradients), (*expected, *wanted)))
        and all(tensor._version == 0 for tensor in inputs)
    )


def _same_but_for_rounding(found: Tensor, expected: Tensor) -> bool:
    alike = found.shape == expected.shape and found.dtype is expected.dtype
    return alike and bool((found - expected).abs().max() <= 1e-12)


def _promotes(function: Any) -> bool:
    """Whether the results have the promoted dtype of states and angles, also where that is not the states'."""
    q, angles = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16, device="cpu"), torch.ones(1, 1, 2, device="cpu")
    return all(output.dtype is torch.float32 for output in function(q, q, angles, angles))
