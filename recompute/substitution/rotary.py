"""The rotary embedding that a module's forward calls, found by what it computes, and a forward with ours in its place.

Attention calls the function that rotates queries and keys by a global name. Nobody's globals are changed for ours to
stand in: the forward is copied, and the copy looks names up in a mapping that asks the original globals each time and
answers with ours where it finds the very function that was recognized. So what is rebound there later is seen, and ours
stands in no longer where it is that function.

Its limits: CPython alone looks globals up in a mapping that is not quite a dict, and a forward that assigns globals, or
asks for all of them, is left alone. So is one that has another function call the one that rotates.
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

from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.recipes import local
from recompute.engine.rng import RngState
from recompute.errors import KernelError

Forward = Callable[..., Any]


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

        That is ``forward`` itself where it is no longer the one that was copied, and under a compiler, which fuses the
        rotation anyway and would take the copy's globals for the original's.
        """
        if torch.compiler.is_compiling() or getattr(forward, "__func__", None) is not self.forward:
            return forward
        return MethodType(self.copy, module)


def find_rotary(module: nn.Module, *, on_cuda_only: bool = False) -> Rotary | None:
    """How ``module`` runs forward with ``rope`` in place, if its class's forward calls one function that rotates.

    ``rope`` then runs where it can compute what the function would (other shapes and dtypes go to the function), and
    with ``on_cuda_only`` only on CUDA.
    """
    base = base_of(module)
    forward, function = base.forward, inspect.unwrap(base.forward)
    if hasattr(base, "_recompute_decorated") or not isinstance(function, FunctionType):
        return None  # a decorated class's forward runs the policy's runner, not the other way round
    namespace = function.__globals__
    names = _looked_up(function.__code__) or ()
    found = {name: rotation for name in names if (rotation := _rotation(namespace.get(name))) is not None}
    if len(found) != 1:
        return None
    ((name, rotation),) = found.items()
    original = namespace[name]
    stand_in = _stand_in(original, rotation, on_cuda_only)
    copy = _with_globals(forward, _Globals(namespace, original, stand_in))
    return None if copy is None else Rotary(name, forward, copy, original, stand_in)


class _Globals(dict[str, Any]):
    """A module's globals as they are at each look, but for one value, in whose place another stands.

    A function's globals must be a dict; those of a subclass are looked up through its own ``__getitem__``. What the
    interpreter reads past that, for an import say, is in the dict itself.
    """

    def __init__(self, namespace: dict[str, Any], original: Any, stand_in: Any):
        super().__init__({name: value for name, value in namespace.items() if name.startswith("__")})
        self._namespace = namespace
        self._original = original
        self._stand_in = stand_in

    def __getitem__(self, name: str) -> Any:
        value = self._namespace[name]
        return self._stand_in if value is self._original else value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._namespace else default


@functools.lru_cache(1024)
def _looked_up(code: CodeType) -> frozenset[str] | None:
    """The names that the code, and what is defined in it, looks up among its globals; None if it needs its very own."""
    instructions = [instruction for part in _parts(code) for instruction in dis.get_instructions(part)]
    names = frozenset(instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL")
    bypasses = not _BYPASSING.isdisjoint(instruction.opname for instruction in instructions)
    return None if bypasses or names & {"globals", "eval", "exec"} else names


_BYPASSING = {"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""Instructions that take globals for a plain dict; the last two are a class body's."""


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _with_globals(function: Any, namespace: dict[str, Any]) -> FunctionType | None:
    """A copy of a function with other globals, inside of copies of the decorators around it.

    None where a decorator does not plainly hold what it decorates: once, in its closure.
    """
    if not isinstance(function, FunctionType):
        return None
    closure = function.__closure__ or ()
    if hasattr(function, "__wrapped__"):
        inner = _with_globals(function.__wrapped__, namespace)
        holds = [cell != CellType() and cell.cell_contents is function.__wrapped__ for cell in closure]
        if inner is None or sum(holds) != 1:
            return None
        closure = tuple(CellType(inner) if held else cell for held, cell in zip(holds, closure, strict=True))
        namespace = function.__globals__
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    vars(copy).update(vars(function))
    if hasattr(function, "__wrapped__"):
        vars(copy)["__wrapped__"] = inner
    return copy


def _stand_in(original: Any, rotation: _Rotation, on_cuda_only: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        from recompute.kernels.rope import rope

        takes_width = rotation.is_partial or cos.shape[-1] == q.shape[-1]
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


@dataclass(frozen=True)
class _Rotation:
    """What a function takes that computes the half rotation."""

    is_partial: bool
    """Also angles for the first columns alone, the others being passed on."""


_rotations: weakref.WeakKeyDictionary[Any, _Rotation | None] = weakref.WeakKeyDictionary()


def _rotation(function: Any) -> _Rotation | None:
    """Whether ``function`` computes what ``rope`` does: by how it is called, then by trials on small tensors."""
    if not _is_as_written(function) or (unsqueeze_dims := _unsqueeze_dims(function)) is None:
        return None
    if function not in _rotations:
        _rotations[function] = _tried(function, unsqueeze_dims)
    return _rotations[function]


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


def _tried(function: Any, unsqueeze_dims: list[tuple[int, ...]]) -> _Rotation | None:
    with _disable_current_modes(), RngState().replayed(), torch.inference_mode(False), torch.enable_grad():
        whole = all(_agrees(function, 8, angles, dim) for angles in (1, 2) for dim in unsqueeze_dims)
        return _Rotation(_agrees(function, 6, 1, ())) if whole and _promotes(function) else None


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
        # Whoever wrote it, it may raise anything at shapes that it was not written for: it is not recognized.
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
