"""What is around forward or backward: modes, torch's settings, autocast, hooks; and what forward reads of the rest."""

import contextvars
import os
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Body, linear
from engine_testing import HIDDEN, TOKENS, Layer, RMSNorm, set_by
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bodies.memory import SAVED, saving
from bodies.modules import Strict
from recompute.engine import numerics
from recompute.engine.numerics import default_dtype

# Modes


def dispatch_mode(alter):
    """A dispatch mode, which turns what ops give into ``alter(op, output)``."""

    class Alters(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return alter(op, op(*args, **(kwargs or {})))

    return Alters


def function_mode(alter):
    """The same of functions, by their names."""

    class Alters(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return alter(getattr(function, "__name__", ""), function(*args, **(kwargs or {})))

    return Alters


def plus_one(op, output):
    """Turns every mul into mul + 1, and every sin into twice that."""
    if op is torch.ops.aten.mul.Tensor:
        return output + 1
    return output * 2 if op is torch.ops.aten.sin.default else output


def noise(op, output):
    """Adds noise to every output of floating point in memory of its own."""
    if isinstance(output, Tensor) and output.is_floating_point() and not op.is_view:
        output = output + torch.rand_like(output) / 8
    return output


def function_plus_one(name, output):
    """Turns every mul into mul + 1, and doubles what other functions give, a detach too."""
    if "mul" in name:
        return output + 1
    return output * 2 if name in ("sin", "detach", "as_strided", "clone") else output


def function_noise(name, output):
    if isinstance(output, Tensor) and name in ("mul", "sin", "cos", "exp", "detach", "clone"):
        return output + torch.rand_like(output) / 8
    return output


ALTERING = {
    **{each.__name__: dispatch_mode(each) for each in (plus_one, noise)},
    **{each.__name__: function_mode(each) for each in (function_plus_one, function_noise)},
}
OUTER = dispatch_mode(lambda op, output: output)()


@contextmanager
def two_modes():
    with OUTER, ALTERING["plus_one"](), ALTERING["function_plus_one"]():
        yield


def chain(self, x):
    return (x.sin() * x.cos()).exp() * x.t().t() * x[:4].exp().sum()


def in_place(self, x):
    y = x.exp().mul(2)
    y.mul_(x.cos())
    return y.sin() * F.dropout(x.sin(), 0.5)


def with_a_mode_inside(body, mode):
    def forward(self, x):
        y = x.exp()
        with mode():
            z = body(self, x) * y
        return z * y.cos()

    return Body(forward)


MODES = {
    **{
        f"{body.__name__} under {name}, {where}": made
        for body in (chain, in_place)
        for name, mode in ALTERING.items()
        for where, made in {
            "in forward": Body(body, around=mode),
            "inside": with_a_mode_inside(body, mode),
            # Under a mode that is around backward a checkpoint would run forward once more.
            "in backward": Body(body, around_backward=mode, ways=("recompute",)),
            "in both": Body(body, around=mode, around_backward=mode, ways=("recompute",)),
        }.items()
    },
    "two modes, of which one is around backward too": Body(chain, around=two_modes, around_backward=lambda: OUTER),
}

# Settings


def numbers(self, x):
    """What the default dtype decides of: promotion from whole numbers, and random factories."""
    whole = torch.arange(1, HIDDEN + 1)
    y = x * whole.sin() * (whole / 3) * (whole * 1.5).cos() * torch.rand(HIDDEN) * whole.double().mean(dtype=None)
    return y.sin() * torch.full((HIDDEN,), 0.3) * torch.linspace(0, 1, HIDDEN).exp() * torch.tensor(0.7) * whole.sqrt()


def changing(self, x):
    """The default dtype changes inside."""
    with default_dtype(torch.float64):
        y = x * torch.rand(HIDDEN).sin() * torch.arange(HIDDEN).cos()
    return y * torch.rand(HIDDEN).sin() * torch.arange(HIDDEN).cos()


def setting_inside(setting):
    def forward(self, x):
        with setting():
            y = F.conv2d(numbers(self, x)[None, None], torch.ones(1, 1, 3, 3)) * torch.rand(HIDDEN).sum()
        return y * y.sum(-1, keepdim=True)

    return forward


def denormal(self, x):
    small = x * 1e-30 * 1e-10
    return (small * 1e30).exp() * (small * 1e30 * 1e10)


def on_meta(self, x):
    assert (torch.rand(HIDDEN).device.type, torch.ones(2).sin().device.type) == ("meta", "meta")
    return x.exp().cos() * x


def made_on_the_cpu(self, x):
    return x * torch.rand(HIDDEN).sin() * torch.arange(HIDDEN).cos()


SETTINGS = {
    "doubles": partial(set_by, torch.set_default_dtype, torch.float64, torch.float32),
    "flushing": partial(set_by, torch.set_flush_denormal, True, False),
    "medium": partial(set_by, torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": lambda: set_by(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "deterministic": partial(set_by, torch.use_deterministic_algorithms, True, False),
    "no mkldnn": partial(torch.backends.mkldnn.flags, enabled=False),
    "no NNPACK": partial(set_by, torch._C._set_nnpack_enabled, False, torch._C._get_nnpack_enabled()),
    "measured convolutions": partial(set_by, torch._C._set_cudnn_benchmark, True, False),
    "cuBLASLt": partial(set_by, torch._C._set_blas_preferred_backend, *map(torch._C._BlasBackend, (2, 1))),
    "plain attention": lambda: sdpa_kernel(SDPBackend.MATH),
    # As an attribute it cannot be set where OpInfo was imported.
    "newer precision": lambda: torch.backends.flags(fp32_precision="tf32"),
}
DEVICES = {
    "a default device, set": partial(set_by, torch.set_default_device, "meta", None),
    "a default device": lambda: torch.device("meta"),
}


def settings():
    return numerics.Numerics()


BEFORE = []
"""The settings at the start of a step."""


def under(forward, setting=nullcontext, backward=nullcontext, parts=dict, **options):
    def start(module):
        for each in (setting, backward):  # a setting may leave something else behind than it found
            with each():
                pass
        BEFORE[:] = [settings()]

    spans = {"around": setting, "around_backward": backward}
    return Body(forward, parts, start=start, state=lambda module: [settings()] == BEFORE, **spans, **options)


def autocast(dtype):
    return partial(torch.autocast, "cpu", dtype=dtype)


HALF, BFLOAT16, FLOAT32 = autocast(torch.float16), autocast(torch.bfloat16), nullcontext

SPANS = {
    "bfloat16": (BFLOAT16,),
    "bfloat16 in both": (BFLOAT16, BFLOAT16),
    "float16 in backward": (BFLOAT16, HALF),
    "float16": (HALF,),
    "float16 in both": (HALF, HALF),
    "bfloat16 in backward": (HALF, BFLOAT16),
    "in backward alone": (FLOAT32, BFLOAT16),
}


def bilinear(self, x):
    """One op casts inside of it."""
    y = self.both(self.linear(x).float().sin(), self.linear(x.cos()).float().tanh())
    return y.exp().sin() * y.sigmoid()


def of_a_bilinear():
    return {**linear(), "both": nn.Bilinear(HIDDEN, HIDDEN, HIDDEN)}


UNDER = {
    **{
        f"{body.__name__}, {name} in {where}": under(body, *spans)
        for body in (numbers, changing)
        for name, setting in SETTINGS.items()
        for where, spans in {"forward": (setting,), "backward": (nullcontext, setting)}.items()
    },
    **{f"a convolution under {name}, inside": under(setting_inside(each)) for name, each in SETTINGS.items()},
    "denormals that forward flushes": under(denormal, SETTINGS["flushing"]),
    **{f"{name} in forward": under(on_meta, each) for name, each in DEVICES.items()},
    **{f"{name} in backward": under(made_on_the_cpu, nullcontext, each) for name, each in DEVICES.items()},
    "no hooks on saved tensors in backward": under(chain, nullcontext, partial(disable_saved_tensors_hooks, "none")),
    **{
        f"autocast, {name}": under(
            lambda self, x: self.layer(x), *spans, parts=lambda: {"layer": Layer()}, together=True
        )
        for name, spans in SPANS.items()
    },
    "autocast, of cheap ops, in backward alone": under(
        lambda self, x: torch.exp(x * 0.1).sin().cos().tanh(), FLOAT32, BFLOAT16
    ),
    "autocast, inside of an op": under(
        bilinear, BFLOAT16, parts=of_a_bilinear, captured="autocast casts inside of aten._trilinear"
    ),
    "autocast, inside of an op, in backward alone": under(bilinear, FLOAT32, BFLOAT16, parts=of_a_bilinear),
}

# Hooks of others on saved tensors


def copies():
    """As ``save_on_cpu`` does: what they give back of a transposed tensor is contiguous."""
    return saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)


def transposed(self, x):
    y = self.norm((x * 1.0).t())
    return y.sin() * y.t().cos().t()


HOOKS = {
    **{f"{name}, on the CPU": saving(each)._replace(around=save_on_cpu) for name, each in SAVED.items()},
    **{
        f"transposed, {name}": Body(transposed, lambda: {"norm": RMSNorm(TOKENS)}, around=around)
        for name, around in {"on the CPU": save_on_cpu, "copied": copies}.items()
    },
}

# What forward reads besides its arguments and its module (invariant 11)


class Settings:
    of_the_class = 1.0
    __slots__ = ("__dict__", "in_a_slot")


def _variable_of_a_closure():
    value = 1.0

    def put(new):
        nonlocal value
        value = new

    return lambda: value, put


VARIABLE = contextvars.ContextVar("scale", default=1.0)
LOCAL, OBJECT = threading.local(), Settings()
SEALED = type("Sealed", (Settings,), {"in_a_slot": property(Settings.in_a_slot.__get__)})()
STRICT = Strict(1.0)
NUMBER, ENTRIES, ITEMS, NESTED = 1.0, {"scale": 1.0}, [1.0], {"inside": [1.0]}
CELL, PUT_IN_CELL = _variable_of_a_closure()
ARRAY = np.ones(())
PLACES = {
    "context variable": VARIABLE.get,
    "thread local": lambda: LOCAL.scale,
    "global": lambda: NUMBER,
    "entry of a dict": lambda: ENTRIES["scale"],
    "item of a list": lambda: ITEMS[0],
    "list inside of a dict": lambda: NESTED["inside"][0],
    "array without dimensions": lambda: float(ARRAY),
    "environment": lambda: float(os.environ["RECOMPUTE_TESTS_SCALE"]),
    "environment by getenv": lambda: float(os.getenv("RECOMPUTE_TESTS_SCALE", "1")),
    "closure": CELL,
    "attribute": lambda: OBJECT.scale,
    "attribute by a constant name": lambda: getattr(OBJECT, "scale"),  # noqa: B009
    "attribute in a slot": lambda: OBJECT.in_a_slot,
    "slot behind a property": lambda: SEALED.in_a_slot,
    "slot of what raises for other names": lambda: STRICT.rows,
    "attribute of a class": lambda: Settings.of_the_class,
    "attribute of a class by an instance": lambda: OBJECT.of_the_class,
}


def put(value):
    global NUMBER
    NUMBER = ENTRIES["scale"] = ITEMS[0] = NESTED["inside"][0] = ARRAY[()] = value
    STRICT.rows = LOCAL.scale = OBJECT.scale = OBJECT.in_a_slot = Settings.of_the_class = value
    Settings.in_a_slot.__set__(SEALED, value)
    os.environ["RECOMPUTE_TESTS_SCALE"] = str(value)
    VARIABLE.set(value)
    PUT_IN_CELL(value)


def reading(read, captured=None):
    """Forward reads one value, and backward would read another one."""
    return Body(
        lambda self, x: x + (self.linear(x.sin()) * self.read[0]()).tanh(),
        lambda: {**linear(), "read": [read]},
        start=lambda module: put(3.0 if module.step in (1, 5) else 2.0),  # once when code has been made of 2.0
        between=lambda *_: put(7.0),
        state=lambda module: [read() for read in PLACES.values()],
        captured=captured,
    )


class Box:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


COUNTS = {"runs": 0}


def changes_its_surroundings(self, x):
    COUNTS["runs"] += 1
    self.log.append(COUNTS["runs"])
    return (x * COUNTS["runs"]).exp().sin()


NEVER_AS_CODE = ["array without dimensions", *(name for name in PLACES if "class" in name or "environment" in name)]
if torch.__version__ < "2.12":  # whose frontend cannot read these
    NEVER_AS_CODE += ["context variable", "slot behind a property"]
READS = {
    **{name: reading(read, captured=None if name in NEVER_AS_CODE else True) for name, read in PLACES.items()},
    "an object that comes later, by its method": reading(None)._replace(
        start=lambda module: module.read.__setitem__(0, Box(2.0 + module.step).read),
        between=lambda module, *_: setattr(module.read[0].__self__, "value", 7.0),
        state=lambda module: module.read[0](),
    ),
    "what it changes there": Body(
        changes_its_surroundings,
        lambda: {"log": []},
        start=lambda module: COUNTS.update(runs=module.step),
        state=lambda module: dict(COUNTS),
    ),
}
