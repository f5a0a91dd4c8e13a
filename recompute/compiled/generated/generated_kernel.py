"""A group of calls at run time: by ATen's kernels until the generated one is compiled and was found to be exact."""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.compiled.generated import device_functions
from recompute.compiled.generated.dropout import flat
from recompute.compiled.generated.spaces import Elements, Rows
from recompute.counters import allocated_nbytes
from recompute.engine.bit_comparison import count_different, in_pieces
from recompute.engine.cut.layout import Layout, are_alike
from recompute.engine.thread_state import in_backward, is_fake, is_in_cuda_graph, local
from recompute.kernels.launch import jit, run, tl
from recompute.kernels.launch_plan import PlannedCall
from recompute.units import humanize

TOLERANCE = {
    torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6,
    torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3,
}  # fmt: skip
"""How far a tensor that was computed by rows may be off in its norm, by the coarsest dtype that its kernel writes."""

_numbers = itertools.count()


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="recompute-generated")


_compiling: set[Future[Any]] = set()


def wait_for_kernels() -> None:
    """Wait until each generated kernel that has been called is compiled. ATen's run until then."""
    wait(_compiling)


@functools.cache
def kernel_of(source: str) -> Any:
    """The Triton kernel that ``source`` defines. Equal sources are one kernel."""
    name = f"<a generated kernel {next(_numbers)}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = len(source), None, lines, name  # where Triton reads the source
    names = {"tl": tl, "functions": device_functions, "math": device_functions.math, "__name__": __name__}
    exec(compile(source, name, "exec"), names)
    function = names[source[4 : source.index("(")]]
    return jit(function, do_not_specialize=list(function.__annotations__))


class Traffic(NamedTuple):
    """The bytes that a kernel reads and writes, and those of the values that never reach memory."""

    read: int
    written: int
    spared: int


class GeneratedKernel:
    """Computes the same as ``aten``, by one kernel."""

    def __init__(
        self,
        source: str,
        aten: Callable[..., Any],
        space: Elements | Rows,
        outputs: Sequence[Layout],
        reused: Mapping[int, int] | None = None,
        nbytes: Traffic | None = None,
        dropouts: int = 0,
    ):
        """space: of its programs. outputs: the layouts of the tensors that it fills.

        reused: the outputs that are written into the memory of an input, which nobody reads afterwards. nbytes: the
        bytes that it moves. dropouts: how many it computes; the state of each follows the tensors.
        """
        self.source = source
        self.nbytes = nbytes or Traffic(0, 0, 0)
        self.reason = ""
        """Why the kernel does not run; "" if it does, or may."""
        self.is_exact = False
        """Whether its first call had ATen's bits; over rows, numbers as close as in another order of a sum."""
        self._aten = aten
        self._space = space
        # Triton is to make no ``fma`` but those that the source has.
        self._settings = {"num_warps": space.warps, "enable_fp_fusion": False}
        self._outputs = tuple(outputs)
        self._reused = dict(reused or {})
        self._compiled: Future[Any] | None = None
        self._dropouts = dropouts
        self._waits_in: int | None = None
        """The backward in which it waits for memory."""
        # A plan repeats all but addresses.
        self._kernel: Callable[..., Any] = self._launch_on if dropouts else PlannedCall(self._launch)
        self._run: Callable[..., Any] = self._wait

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def __str__(self) -> str:
        read, written, spared = map(humanize, self.nbytes)
        exact = "exact but for the order of sums" if self._space.rounds else "exact"
        state = exact if self.is_exact else f"ATen's, as {self.reason}" if self.reason else "not run yet"
        return f"{self.name}: reads {read}, writes {written}, spares {spared}; {state}"

    @property
    def name(self) -> str:
        """That of its function, made of the ops that it computes."""
        return self.source[4 : self.source.index("(")]

    def _launch_on(self, *arguments: Any) -> Any:
        """The kernel, with dropouts."""
        return self._launch(*arguments[: -self._dropouts], states=flat(arguments[-self._dropouts :]))

    def _launch(self, *tensors: Tensor, states: Sequence[int] = ()) -> Any:
        device = tensors[0].device
        made = [
            tensors[self._reused[index]]
            if index in self._reused
            else torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=device)
            for index, output in enumerate(self._outputs)
        ]
        run(kernel_of(self.source), self._space.programs, *tensors, *made, *states, **self._settings)
        return tuple(made)

    def _wait(self, *arguments: Any) -> Any:
        """A call before it is known whether the kernel gives ATen's bits."""
        if is_fake():
            return (self._aten if local.until_captured == "ATen" else self._kernel)(*arguments)
        if self._compiled is None:
            dtypes = [each.dtype for each in arguments if isinstance(each, Tensor)]
            self._compiled = _compilers().submit(self._compile, arguments[0].device, dtypes)
            _compiling.add(self._compiled)
            self._compiled.add_done_callback(_compiling.discard)
        if not self._compiled.done() or is_in_cuda_graph():
            return self._aten(*arguments)
        error = self._compiled.exception()
        if error is not None:
            return self._refuse(f"it does not compile: {error}", self._aten(*arguments))
        if self._waits_for_memory(arguments[0].device):
            return self._aten(*arguments)
        expected, found = self._aten(*arguments), self._kernel(*arguments)
        tolerance = max(TOLERANCE.get(output.dtype, 0.0) for output in self._outputs)
        for one, other, output in zip(expected, found, self._outputs, strict=True):
            other = other.as_strided(output.shape, output.stride)
            if not are_alike(Layout.of(one), output) or not self._agrees(one, other, tolerance):
                return self._refuse("its first call did not give ATen's result", expected)
        self._run, self.is_exact = self._kernel, True
        return expected

    def _waits_for_memory(self, device: torch.device) -> bool:
        """Whether ATen's outputs beside the kernel's would make a new peak here, but may not later in this backward.

        Backward calls it in the last of equal layers first, where the most is alive.
        """
        alive, peak = allocated_nbytes(device) or (0, math.inf)
        outputs = sum(math.prod(output.shape) * output.dtype.itemsize for output in self._outputs)
        backward = torch._C._current_graph_task_id()
        if self._waits_in is None:
            self._waits_in = backward
        return in_backward() and self._waits_in == backward and alive + 2 * outputs > peak

    def _agrees(self, expected: Tensor, found: Tensor, tolerance: float) -> bool:
        if not self._space.rounds or not expected.is_floating_point():
            return not count_different(expected, found)
        errors, sizes = [0.0], [0.0]
        for one, other in in_pieces(expected.flatten(), found.flatten()):
            one, other = one.float(), other.float()
            if not bool((one.isfinite() == other.isfinite()).all()):
                return False
            one, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in (one, other))
            errors.append(float((one - other).norm()))
            sizes.append(float(one.norm()))
        return math.hypot(*errors) <= tolerance * math.hypot(*sizes)

    def _refuse(self, reason: str, result: Any) -> Any:
        self._run, self.reason = self._aten, reason
        return result

    def _compile(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                outputs = [output.dtype for output in self._outputs]
                grid = (self._space.programs,)
                kernel_of(self.source).warmup(
                    *dtypes, *outputs, *[0] * (2 * self._dropouts), grid=grid, **self._settings
                )
