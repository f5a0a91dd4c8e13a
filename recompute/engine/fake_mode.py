"""The mode of tensors without values, which have no address: nobody can launch a kernel on them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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
        return False  # torch's own work around each op then takes a tenth of its time

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
    """As ``DEVICE``, without asking other modes. Half of all ops on fake tensors are this one."""
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
    """The error to raise in its place. where: the module that runs; by default the traceback tells."""
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
        f"{where or ('the model' if module is None else type(module).__name__)} {what}{place}. Here the model runs on "
        "fake tensors, which have no memory. Register that code as an operator (torch.library.triton_op and "
        "wrap_triton, or torch.library.custom_op and register_fake), or measure the model on its device, with "
        "recompute.profile."
    )


_LIBRARIES = ("recompute", "torch", "triton")


_NEVER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of ops whose output depends on values, or that change a tensor's layout or storage."""
_PLAIN = "_is_plain"
"""The name of an attribute of fake tensors that are known to be plain."""
_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_META = torch.device("meta")


class _Layout(NamedTuple):
    """How to make an output anew."""

    source: int | None
    """Which of the op's tensors has the storage that it is a view of; None: it has one of its own."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]
    """``_PLAIN``, and the constructor's own, for the constructor takes half as long as all else here."""


class KnownLayouts:
    """The layouts of ops' results under a mode of fake tensors, by the layouts of their arguments.

    Torch's own mode remembers them, too, but takes as long to look one up as to calculate it: most of an estimate's
    time.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[int, dict[Any, Any] | None] = {}
        """By the ``id`` of an op, which lives for good: the outputs by its arguments; None: it is always run."""

    def run(self, op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """The result of ``run``, which runs ``op`` on these arguments in the mode; made anew if it is known."""
        number = id(op)
        if number not in self._known:
            depends_on_layouts = op.namespace == "aten" and not any(tag in op.tags for tag in _NEVER)
            self._known[number] = {} if depends_on_layouts else None
        known = self._known[number]
        if known is None:
            return run()
        parts: list[Any] = []
        tensors: list[FakeTensor] = []
        if not self._describe(args, parts, tensors) or not self._describe(kwargs.items(), parts, tensors):
            return run()
        key = tuple(parts)
        found = known.get(key) if tensors else None
        if found is None:
            output = run()
            layouts = _layouts(output, tensors, op._schema.is_mutable) if tensors else None
            after: list[Any] = []
            self._describe(args, after, [])
            self._describe(kwargs.items(), after, [])
            if layouts is not None and after == parts:  # an ``out`` may have been given another size
                known[key] = layouts
            return output
        if type(found) is int:
            return tensors[found]
        if isinstance(found, _Layout):
            return self._make(found, tensors)
        return type(found)([self._make(each, tensors) if isinstance(each, _Layout) else each for each in found])

    def _describe(self, values: Iterable[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add to ``parts`` all that a layout may depend on; False where it may depend on something else."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or not _is_plain(value):
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                tensors.append(value)
            elif kind in (list, tuple):
                parts.append(len(value))
                if not self._describe(value, parts, tensors):
                    return False
            elif kind in _CONSTANTS:
                parts += (kind, value)
            else:
                return False
        return True

    def _make(self, layout: _Layout, tensors: list[FakeTensor]) -> FakeTensor:
        made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        if layout.source is not None:
            made.set_(tensors[layout.source].untyped_storage(), layout.offset, layout.shape, layout.stride)
        fake: Any = Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=layout.device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(layout.attributes)
        return fake


def _layouts(output: Any, tensors: list[FakeTensor], writes: bool) -> Any:
    """How to make the output anew; None where it cannot be made so.

    An op that writes returns one of its own tensors: the index of it.
    """
    if writes:
        return next((index for index, each in enumerate(tensors) if each is output), None)
    storages = [each.untyped_storage()._cdata for each in tensors]
    if type(output) not in (list, tuple):
        return _layout(output, tensors, storages)
    found: list[Any] = []
    for each in output:
        layout = each if type(each) in (int, type(None)) else _layout(each, tensors, storages)
        if layout is None and each is not None:
            return None
        if isinstance(layout, _Layout) and layout.source is None:
            storages.append(each.untyped_storage()._cdata)  # another output that shares it cannot be made so
        found.append(layout)
    return type(output)(found)


def _layout(output: Any, tensors: list[FakeTensor], storages: list[int]) -> _Layout | None:
    if type(output) is not FakeTensor or not _is_plain(output) or any(output is each for each in tensors):
        return None
    device, storage = output.fake_device, output.untyped_storage()
    if device.type == "meta":
        return None
    source = storages.index(storage._cdata) if storage._cdata in storages else None
    offset, attributes = int(output.storage_offset()), {**vars(output), _PLAIN: True}
    layout = _Layout(source, output.shape, output.stride(), offset, output.dtype, device, attributes)
    if source is not None:
        return layout if source < len(tensors) else None
    own = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META).untyped_storage()
    return layout if not layout.offset and own.nbytes() == storage.nbytes() else None


def _is_plain(tensor: FakeTensor) -> bool:
    """Whether shape, strides, offset, dtype and device are all that there is to it."""
    if _PLAIN in vars(tensor):
        return True
    is_strided = tensor.constant is None and tensor.layout is torch.strided
    return is_strided and not tensor.dtype.is_complex and not tensor.is_neg()
