"""Memory that is written to by no op: through arrays, capsules, addresses and kernels that a body hands it to."""

import ctypes
import operator

import numpy as np
import torch
import triton
import triton.language as tl
from corpus import Body, nothing
from engine_testing import function_of, no_tensors

SIZE = 8
"""How many elements a write changes."""


def add_one(address, change=lambda value: value + 1):
    memory = (ctypes.c_float * SIZE).from_address(address)
    memory[:] = [change(value) for value in memory]


def add_to_array(array):
    array.reshape(-1)[:SIZE] += 1


def through_an_address(tensor):
    add_one(tensor.data_ptr())


@triton.jit
def add_one_kernel(pointer, size: tl.constexpr):
    offsets = tl.arange(0, size)
    tl.store(pointer + offsets, tl.load(pointer + offsets) + 1)


WRITES = {
    "numpy": lambda tensor: add_to_array(tensor.detach().numpy()),
    "asarray": lambda tensor: add_to_array(np.asarray(tensor.detach())),
    "dlpack": lambda tensor: add_one(np.from_dlpack(tensor.detach()).ctypes.data),
    "a capsule": lambda tensor: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach())).data.add_(1),
    "torch's from_dlpack": lambda tensor: torch.from_dlpack(tensor.detach()).data.add_(1),
    "an address": through_an_address,
    "a storage's address": lambda tensor: add_one(tensor.untyped_storage().data_ptr()),
    "a storage's bytes": lambda tensor: tensor.untyped_storage().__setitem__(3, 64),
    "a storage's fill": lambda tensor: tensor.untyped_storage().fill_(64),
    "a kernel launched by hand": lambda tensor: add_one_kernel[(1,)](tensor.detach(), SIZE),
}


def saved_before_and_after(x, write):
    made = x.exp()
    y = made.sin() * x.cos()  # saves what is made of it before it is written to
    write(made)
    return y * made * made.cos()


def written_between(x, write):
    made = x.detach().exp()
    write(made)
    return x * made * x.sin()


def an_argument(x, write):
    y = x.sin().cos()
    write(x)
    return y * x.exp().sin()


def a_view(x, write):
    made = x.exp()
    y = made * made.sin()
    write(made.view(2, -1))
    return y * made.cos()


def written_in_place_afterwards(x, write):
    made = x.detach().exp()
    write(made)
    made.mul_(2)
    y = made.sin() * x
    write(made)
    return y.sin() * made


def doubles(x, other):
    """Doubles its argument by its address, and what it returns, as a kernel launched by hand may."""
    add_one(other.data_ptr(), lambda value: value * 2)
    return x * other


Doubles = function_of(doubles, lambda gradient: (gradient, None), saves=no_tensors)


def kernel_in_a_function(x, write):
    made = x.exp()
    y = made.sin() * x.cos()
    write(made)
    return Doubles.apply(y, made.detach()).sin() * made * made.cos()


WRITTEN = (saved_before_and_after, written_between, an_argument, a_view, written_in_place_afterwards)
WHEN = {
    "": lambda number: True,
    ", now and then": lambda number: number in (2, 5, 6),  # other frames follow plans of frames without a write
}


def written(body, write, when):
    def forward(self, x):
        self.number += 1
        return body(x, write if when(self.number) else nothing)

    return of_a_tape(forward, lambda: {"number": -1})


def of_a_tape(forward, parts=dict, start=lambda module: None):
    """A checkpoint would write again."""
    return Body(forward, parts, lambda x: (x * 1.0,), start, ways=("recompute",), drops=False)


def reads_what_an_array_has(self, x, data, array):
    """The array was made before the region, and has the memory of its input."""
    y = data.sin() * x
    array += 1
    return y * (data.cos() * x)


def with_an_array(x):
    array = np.linspace(-1, 1, SIZE, dtype=np.float32)
    return x, torch.from_numpy(array), array


def writes_to_an_array_of_an_earlier_frame(export):
    def forward(self, x):
        y = x * self.shared.sin() * x.cos()
        for array in self.arrays:
            add_one(array.ctypes.data)
        self.arrays.append(export(self.shared))
        return y * self.shared.cos()

    def start(module):
        module.arrays, module.shared = [], torch.linspace(-1, 1, SIZE)

    return of_a_tape(forward, start=start)


EXPORTS = {"numpy": operator.methodcaller("numpy"), "asarray": np.asarray, "dlpack": np.from_dlpack}
UNSEEN = {
    **{
        f"{name}, {body.__name__}{when}": written(body, write, is_time)
        for name, write in WRITES.items()
        for body in WRITTEN
        for when, is_time in WHEN.items()
    },
    "what a custom Function is given the address of": written(
        kernel_in_a_function, through_an_address, WHEN[", now and then"]
    ),
    "an array with the memory of what it reads": Body(reads_what_an_array_has, given=with_an_array, drops=False),
    **{
        f"an array of an earlier frame, by {name}": writes_to_an_array_of_an_earlier_frame(export)
        for name, export in EXPORTS.items()
    },
}
