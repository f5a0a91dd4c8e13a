"""Rotary embeddings: trials recognize the function that attention calls, and ``kernels.rope`` stands in for it.

Attention calls the function that rotates queries and keys by a global name. To have it call ours, forward is copied:
the same code, with a dict of globals of its own, in which that name is ours. Before each call the copy's globals are
brought up to date with the module's (``_CopiedGlobals``), so that what is rebound there is seen.

Why not rebind the name in the module while attention runs, as ``unittest.mock.patch`` would?

1. All threads share a module's globals. Another thread, whose attention may be under no policy, would call ours.
2. ``torch.compile`` and captured regions guard the globals that their graphs read. Meanwhile calls in other threads
   would fail these guards, and be traced again.
3. Where two calls overlap in time, the first to end would take ours away from the other, and change its values.

A forward is left alone that assigns globals, asks for all of them, or has a helper rotate.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recompute.compiled.runner import Forward
from recompute.engine.reachable_objects import base_of
from recompute.engine.rng import RngState
from recompute.engine.thread_state import local
from recompute.errors import KernelError
from recompute.substitution.careful_calls import careful
from recompute.substitution.kernel_runner import CreditedTo, KernelRunner
from recompute.substitution.module_formula import is_decorated


@dataclass(frozen=True)
class Rotary:
    """A forward that rotates queries and keys, and its copy in which ``recompute.kernels.rope`` does."""

    name: str
    """The name by which forward calls the function that rotates."""
    forward: Forward
    copy: FunctionType
    original: Forward
    """The function that rotates."""
    stand_in: Forward
    """Our function in its place."""
    globals: _CopiedGlobals
    """Of the copy."""

    def bind(self, module: nn.Module, forward: Forward) -> Forward:
        """What to call in the place of ``forward``, a bound method of ``module``: the copy, but in two cases.

        If ``forward`` is no longer the method that was copied, it is called itself. So it is under a compiler, which
        fuses the rotation anyway, and would take the copy's globals for the original's.
        """
        if torch.compiler.is_compiling() or getattr(forward, "__func__", None) is not self.forward:
            return forward
        self.globals.update()
        return MethodType(self.copy, module)


def find_rotary(module: nn.Module, *, on_cuda_only: bool = False) -> Rotary | None:
    """How ``module`` runs its forward with ``rope``, if its class's forward calls exactly one function that rotates.

    ``rope`` runs where it can compute what that function would; other shapes and dtypes go to the function. With
    ``on_cuda_only``, it runs on CUDA alone.
    """
    forward = base_of(module).forward
    function = inspect.unwrap(forward)
    if is_decorated(module) or not isinstance(function, FunctionType):
        return None  # the forward of a decorated class runs the policy's runner: a copy of it would, too
    namespace = function.__globals__
    names = _global_names(function.__code__)
    found = {name: is_partial for name in names if (is_partial := _rotates(namespace.get(name))) is not None}
    if len(found) != 1:
        return None
    ((name, is_partial),) = found.items()
    original = namespace[name]
    stand_in = _stand_in(original, is_partial, on_cuda_only)
    copied = _CopiedGlobals(namespace, names, original, stand_in)
    copy = _copy_with_globals(forward, copied.namespace)
    return None if copy is None else Rotary(name, forward, copy, original, stand_in, copied)


@dataclass
class KernelRotaryRunner(KernelRunner):
    """Runs attention's own forward, in which our function rotates."""

    rotary: Rotary
    stands_in_for_parts = True

    @property
    def substitutes(self) -> dict[Forward, Forward]:
        """The function that forward calls, and ours: a graph of the region around replaces the one by the other."""
        return {self.rotary.original: self.rotary.stand_in}

    def _what(self) -> str:
        return f"rope, as {self.rotary.name}"

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        return True  # our function asks where its queries are

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with CreditedTo(self.statistics):
            output = self.rotary.bind(module, forward)(*args, **kwargs)
        self.held.count_run()
        return output


class _CopiedGlobals:
    """A copy of a module's globals in which one value is replaced by another."""

    __slots__ = ("_known", "_original", "_source", "_stand_in", "namespace")

    def __init__(self, source: dict[str, Any], names: Collection[str], original: Any, stand_in: Any):
        """source: the module's own. names: those that the code reads, which ``update`` keeps up to date."""
        self._source = source
        self._original = original
        self._stand_in = stand_in
        self._known = {name: _MISSING for name in names}
        self.namespace = dict(source)

    def update(self) -> None:
        """Take over what has been rebound in the module since."""
        for name, known in self._known.items():
            value = self._source.get(name, _MISSING)
            if value is not known:
                self._known[name] = value
                if value is _MISSING:
                    self.namespace.pop(name, None)
                else:
                    self.namespace[name] = self._stand_in if value is self._original else value


_MISSING = object()
"""In the place of a global that there is none of: a builtin's name, say."""


@functools.lru_cache(1024)
def _global_names(code: CodeType) -> frozenset[str]:
    """The names of the globals that the code, or a function defined in it, reads; none if a copy could not work."""
    instructions = [instruction for part in _nested(code) for instruction in dis.get_instructions(part)]
    names = frozenset(instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL")
    needs_own = any(instruction.opname in _NEEDS_THE_MODULES_OWN for instruction in instructions)
    return frozenset() if needs_own or names & {"globals", "eval", "exec"} else names


_NEEDS_THE_MODULES_OWN = {"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""Instructions that write globals, or that read them in class bodies, whose names are not among those looked for."""


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _copy_with_globals(function: Any, namespace: dict[str, Any]) -> FunctionType | None:
    """A copy of a function with other globals, inside of copies of the decorators around it.

    None if a decorator does not hold the function that it decorates in exactly one cell of its closure.
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
                pass  # shapes or dtypes that the original alone takes, or refuses with an error of its own
        return original(q, k, cos, sin, *args, **kwargs)

    return rotate


def _is_as_written(function: Any) -> bool:
    """Whether it is a function, or a module that Hugging Face's ``kernels`` made of one and has put no kernel into."""
    return isinstance(function, FunctionType) or (isinstance(function, nn.Module) and "forward" not in vars(function))


_known: weakref.WeakKeyDictionary[Any, bool | None] = weakref.WeakKeyDictionary()


def _rotates(function: Any) -> bool | None:
    """None if ``function`` does not compute what ``rope`` does, by its parameters and by trials on small tensors.

    Otherwise, whether it also takes angles for the first columns alone, and leaves the others as they are.
    """
    if not _is_as_written(function) or (unsqueeze_dims := _unsqueeze_dims(function)) is None:
        return None
    if function not in _known:
        _known[function] = _tried(function, unsqueeze_dims)
    return _known[function]


def _unsqueeze_dims(function: Any) -> list[tuple[int, ...]] | None:
    """The arguments after (q, k, cos, sin) to try a function with; None for one with other parameters."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):  # it has no signature, or an invalid one
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
    """Whether outputs and gradients equal the reference's in float64, up to rounding, and no input is changed."""
    from recompute.kernels.rope import rope_reference

    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()

    q, k = (make(2, 3, heads, 8) if unsqueeze_dim == (2,) else make(2, heads, 3, 8) for heads in (4, 2))
    inputs = (q, k, make(angles, 3, rotated), make(angles, 3, rotated))
    directions = (make(*q.shape), make(*k.shape))
    try:
        outputs = careful(function)(*inputs, *unsqueeze_dim)
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
    """Whether the results have the promoted dtype of states and angles where the two differ."""
    q, angles = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16, device="cpu"), torch.ones(1, 1, 2, device="cpu")
    return all(output.dtype is torch.float32 for output in function(q, q, angles, angles))
