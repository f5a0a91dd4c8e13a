"""What a module computes, as a formula. It is read off the graph that torch's frontend takes of forward.

The frontend interprets the bytecode of forward on tensors without values: none of the module's Python runs. A module
has no formula if its forward would change anything but its own local variables, or depends on values or on how many
rows it is given.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from recompute.compiled.frontend import depends_on_sizes, has_effects, last_trace
from recompute.compiled.guards import MISSED, GuardedCalls
from recompute.compiled.recording import Recording
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.dtensors import are_sharded
from recompute.engine.modes import under
from recompute.engine.numerics import Autocast
from recompute.engine.reachable_objects import base_of
from recompute.engine.rng import RngState
from recompute.engine.tape.op_arguments import PLAIN
from recompute.engine.thread_state import swapped
from recompute.substitution.formula_writer import Formula, FormulaWriter
from recompute.substitution.settings import checkpoint_switch, names_in


class Conditions(NamedTuple):
    """The conditions under which a forward is traced."""

    training: bool = True
    """In training gradients are on and autocast is off, else the other way round: a forward may ask for either."""
    rows: tuple[int, int] | None = (2, 3)
    """The input is (*rows, width); None: it has any rows."""
    dtype: torch.dtype = torch.float32
    """The dtype of the input."""
    parameters: torch.dtype = torch.float32


def formula_of(module: nn.Module, conditions: Conditions) -> Formula | None:
    """The formula of ``module``'s output; None if it has none. Forward takes one argument.

    Under ``looking_once`` one of several modules that are alike is traced.
    """
    if is_decorated(module) and getattr(vars(module).get(RUNNER), "runner", module) is not None:
        return None  # its forward runs a policy of its own
    known = _known.get()
    if known is None:
        return _formula_of(module, conditions)
    key = conditions, _likeness(module)
    if key not in known:
        known[key] = _formula_of(module, conditions), module  # it stays, so that nothing else gets the id of a part
    return known[key][0]


@contextmanager
def looking_once() -> Iterator[None]:
    """Inside, nothing changes what modules compute: ``formula_of`` may trace one for all that are alike."""
    if _known.get() is not None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


_known: ContextVar[dict[Hashable, tuple[Formula | None, nn.Module]] | None] = ContextVar("formulas", default=None)


def is_decorated(module: nn.Module) -> bool:
    """Whether the class of ``module`` is decorated with a policy."""
    return hasattr(type(module), "_recompute_decorated")


def _likeness(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same: they have a class and all settings in common, and parts that are alike.

    Parameters and buffers are alike if their types, dtypes and shapes are. Any other attribute that is no plain value
    has to be the same object.
    """
    given = {name: value for name, value in vars(module).items() if name not in _PARTS}
    tensors = [
        (name, each is None or (type(each), each.dtype, None if is_lazy(each) else each.shape))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    ]
    parts = [(name, None if part is None else _likeness(part)) for name, part in module._modules.items()]
    return base_of(module), _value_likeness(given), tuple(tensors), tuple(parts)


_PARTS = ("_parameters", "_buffers", "_modules")
_PLAIN_VALUES = (bool, int, str, type(None), torch.dtype, torch.device)


def _value_likeness(value: Any) -> Hashable:
    if type(value) in _PLAIN_VALUES:
        return type(value), value
    if type(value) is float:
        return float, repr(value)  # 0.0 equals -0.0
    if type(value) in (list, tuple):
        return type(value), tuple([_value_likeness(each) for each in value])
    if type(value) is set:
        return set, frozenset(map(_value_likeness, value))
    if type(value) in (dict, OrderedDict):
        return type(value), tuple([(_value_likeness(key), _value_likeness(each)) for key, each in value.items()])
    return "one object", id(value)


def takes_one_argument(module: nn.Module) -> bool:
    """Whether forward takes one argument, and no others that have defaults."""
    try:
        return len(inspect.signature(base_of(module).forward).parameters) == 2
    except ValueError:  # a builtin has no signature
        return False


_ASK_FOR_DEVICE = {"device", "is_cuda", "is_cpu", "is_meta", "get_device"}
"""A forward asks by these names where a tensor is. Forwards are traced on a device where nothing trains."""


def _formula_of(module: nn.Module, conditions: Conditions) -> Formula | None:
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_lazy(each) or not (type(each) in PLAIN or are_sharded((type(each),))) for each in tensors):
        return None
    if any(_ASK_FOR_DEVICE & names_in(base_of(part)) for part in module.modules()):
        return None
    with _looking(conditions.training):
        stand_in = _without_values(module, conditions)
        for width in _widths(module):
            taken = _graph_of(stand_in, _input(conditions, width))
            if taken is not None:
                return FormulaWriter(stand_in, taken.graph, taken.given).formula()
    return None


def _widths(module: nn.Module) -> list[int]:
    """How wide the input may be, the likeliest first."""
    of_parameters = [size for each in module.parameters() for size in each.shape[::-1]]
    values = [size for value in vars(module).values() for size in (value if type(value) in (list, tuple) else (value,))]
    settings = [size for size in values if type(size) is int and size > 1]
    return list(dict.fromkeys([*of_parameters, *settings, 8]))[:3]


def _input(conditions: Conditions, width: int) -> Tensor:
    x = torch.empty(*conditions.rows or (2, 3), width, dtype=conditions.dtype, device="meta", requires_grad=True)
    if conditions.rows is None:
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
    return x


def _without_values(module: nn.Module, conditions: Conditions) -> nn.Module:
    """A module of the same class, with the same attributes, and parameters that have no memory.

    Its forward is not checkpointed, as a policy is inside of checkpoints.
    """
    copy = object.__new__(base_of(module))
    copy.__dict__.update(vars(module), training=conditions.training, **checkpoint_switch(module))
    if not is_decorated(module):
        copy.__dict__.pop(RUNNER, None)
    copy.__dict__["_parameters"] = {
        name: None if each is None else _parameter(each, conditions.parameters)
        for name, each in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if each is None else torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if each is None else _without_values(each, conditions) for name, each in module._modules.items()
    }
    return copy


def _parameter(given: Tensor, dtype: torch.dtype) -> nn.Parameter:
    is_float = given.is_floating_point()
    made = torch.empty(given.shape, dtype=dtype if is_float else given.dtype, device="meta")
    return nn.Parameter(made, requires_grad=is_float)


@contextmanager
def _looking(training: bool) -> Iterator[None]:
    """Inside, no setting from around has an effect. Afterwards everything is as before."""
    before = Autocast()
    with ExitStack() as stack:
        stack.callback(before.put)
        stack.enter_context(RngState().replayed())
        stack.enter_context(under((), ()))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(training))
        fakes = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(swapped(fakes, "disabled", True))  # it logs widths that do not fit
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, not training)
        torch.set_autocast_cache_enabled(False)
        yield


class _Taken:
    """A graph, and the tensors that it is given. It takes the place of the graph's outputs."""

    def __init__(self, graph: fx.Graph, given: Sequence[Any]):
        self.graph, self.given = graph, given


class _Untold(Exception):
    """A graph does not show all that forward does. No other file sees this exception."""


class _Graphs(GuardedCalls):
    """The graphs that were taken of a forward. Their guards tell whether one fits another module, too."""

    MOST = 64

    def __init__(self) -> None:
        super().__init__(_compile)
        self.count = 0


_graphs: dict[Any, _Graphs] = {}
"""Graphs by the forward that they were taken of."""
_lock = threading.RLock()


def _graph_of(module: nn.Module, x: Tensor) -> _Taken | None:
    """The graph that torch's frontend takes of a module's forward; None if it takes none, or not all of forward.

    No forward runs, except the code that packs the outputs of the graph.
    """
    forward = base_of(module).forward
    call: tuple[Any, tuple, dict] = MethodType(forward, module), (x,), {}
    with _lock:
        try:
            graphs = _graphs.get(forward)
            if graphs is None or not graphs.are_current or graphs.count >= _Graphs.MOST:
                graphs = _graphs[forward] = _Graphs()
            with torch._dynamo.config.patch(recompile_limit=2 * _Graphs.MOST):
                result = graphs.run(*call)
                if result is MISSED:
                    graphs.count += 1
                    result = graphs.trace(*call, Recording(), (forward, *module.modules()))
        except Exception:
            # Any module's forward comes here, and the frontend may raise anything. Then it is not recognized.
            return None
    return result if type(result) is _Taken else None


def _compile(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    tells_all = not (last_trace.asks or has_effects() or depends_on_sizes())
    outputs = len(next(node for node in module.graph.nodes if node.op == "output").args[0])

    def taken(*given: Any) -> Any:
        if not tells_all:
            raise _Untold  # before anything is changed
        return (_Taken(module.graph, given),) * outputs

    return taken
