"""Generated kernels of plain functions, without a model around them."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.compiled.codegen import Code
from recompute.compiled.generated import device_functions
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.groupable import can_be_generated
from recompute.compiled.generated.kernel_source import KernelSource
from recompute.compiled.generated.switch import Generates, generating_on
from recompute.compiled.recording import Recording

interpreted = pytest.mark.skipif(not device_functions.is_interpreted, reason="needs TRITON_INTERPRET=1")


@contextmanager
def kernels_made():
    """Gets the kernels that captured code generates meanwhile."""
    made, own = [], GeneratedKernel.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneratedKernel, "__init__", lambda self, *args: (own(self, *args), made.append(self))[0])
        yield made


def wait_for(kernels):
    """Until those that are being compiled are."""
    for kernel in kernels:
        if kernel._compiled is not None:
            kernel._compiled.result()


class _Records(TorchDispatchMode):
    def __init__(self, recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        started = self.recording.start(op, args, kwargs or {})
        output = op(*args, **(kwargs or {}))
        if started is not None:
            self.recording.end(started, output)
        return output


def written(function, *tensors, generates=Generates.EXACT):
    """The calls that ``function`` makes on these tensors, as code; and the buffers of its outputs."""
    recording = Recording(is_open=True, generates=generates)
    for position, tensor in enumerate(tensors):
        recording.give(tensor, position)
    with torch.no_grad(), _Records(recording):
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        numbers = [recording.use(output).buffer for output in outputs]
    code = Code(recording)
    code.tensors |= {number: f"t{number}" for number in range(len(tensors))}
    with generating_on(tensors[0].device.type):
        for call in recording.calls:
            code.call(call)
    recording.current.clear()
    return code, numbers


def generated(function, *tensors):
    """One kernel for all that ``function`` calls, and the tensors that it takes."""
    code, stored = written(function, *tensors, generates=Generates.ROUNDED)
    statements = [statement for statement in code.statements if statement.call is not None]
    for statement in statements:
        assert can_be_generated(statement.call, code.recording), statement.text
    source = KernelSource(code.recording, {number: s for s in statements for number in s.call.results}, stored)
    buffers = code.recording.buffers

    def aten(*_):
        outputs = function(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    kernel = GeneratedKernel(source.text(), aten, source.space, [buffers[number].layout for number in stored])
    return kernel, [tensors[buffer] for buffer in source.given.values()]


def as_one_kernel(function, *tensors):
    """What one kernel gives, beside what ATen does."""
    kernel, given = generated(function, *tensors)
    return lambda: (kernel._launch(*given), kernel._aten())
