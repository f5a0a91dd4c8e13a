"""The mode of tensors without values, which have no address: nobody can launch a kernel on them."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from recompute.engine.known_layouts import KnownLayouts
from recompute.engine.known_values import KnownValues
from recompute.errors import ModelError

DEVICE = torch.ops.prim.device.default  # each op on fake tensors calls this many times
_GROUPED_MM, _CAST = torch.ops.aten._grouped_mm.default, torch.ops.aten._to_copy.default


class FakeMode(FakeTensorMode):
    """Refuses to tell addresses, where torch's own mode says 0. A kernel launched there would cost the device.

    It also knows the values that shapes depend on, and runs grouped matrix products in every dtype, as devices do.
    Torch's own mode refuses both; of the products those in float32 (2.11 to 2.14).
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._allow_unsafe_data_ptr_access = False
        self.values = KnownValues()
        self._layouts = KnownLayouts(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch wraps around each op then takes a tenth of its time

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and asks_for_address(error):
            raise refused_address(error) from error

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is DEVICE:
            return device_of(args[0])
        with torch._C.DisableTorchFunction():  # modes for functions have seen the function that calls this op
            return self.run(op, types, args, kwargs or {})

    def run(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        whole, layouts = super().__torch_dispatch__, self._layouts
        if op is not _GROUPED_MM:

            def run(op: Any, args: Any, kwargs: Any) -> Any:
                return layouts.run(op, args, kwargs, lambda: whole(op, types, args, kwargs))

            return self.values.run(op, args, kwargs, run)
        if args[0].dtype is torch.bfloat16 or kwargs.get("out_dtype") is not None:
            return super().__torch_dispatch__(op, types, args, kwargs)
        narrow = [self._cast(value, torch.bfloat16) for value in args]
        return self._cast(super().__torch_dispatch__(op, types, narrow, kwargs), args[0].dtype)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return super().__torch_dispatch__(_CAST, (type(value),), (value,), {"dtype": dtype})


def device_of(tensor: Tensor) -> torch.device:
    """What ``DEVICE`` returns, without asking other modes. Half of all ops on fake tensors are this one."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else DEVICE(tensor)


def asks_for_address(error: Exception) -> bool:
    """Whether it is torch's error where somebody asks for the memory of a tensor without values."""
    return any(text in str(error) for text in _REFUSALS) and not isinstance(error, ModelError)


_REFUSALS = (
    "Cannot access data pointer of Tensor",
    ".numpy() is not supported for tensor subclasses",
    "Pointer argument must be either uint64 or have data_ptr method",  # of Triton's launcher, whatever data_ptr raised
)


def refused_address(error: Exception, where: str = "") -> ModelError:
    """What to raise in its place. where: names the module that runs; by default the traceback tells."""
    module, place, kernel = None, "", None
    for frame, line in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            module = own if isinstance(own, nn.Module) else module
            place = f" in {frame.f_code.co_filename}:{line}"
        elif kernel is None and type(own).__module__.startswith("triton.runtime"):
            kernel = getattr(getattr(own, "fn", None), "__name__", None)
    what = f"launches the kernel {kernel}" if kernel else "asks for the memory of a tensor, as to launch a kernel,"
    return ModelError(
        f"{where or ('the model' if module is None else type(module).__name__)} {what}{place}; tensors without values "
        "have no memory. Make what launches it an operator with a fake implementation, by torch.library.triton_op and "
        "wrap_triton, or by torch.library.custom_op and register_fake; or measure the model on its device, with "
        "recompute.profile."
    )


_LIBRARIES = ("recompute", "torch", "triton")
