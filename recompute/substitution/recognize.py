"""What a module computes, read off its traced graph, so that a kernel can stand in whatever the class is called."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from recompute.engine.checkpoint.arguments import fingerprint, snapshot
from recompute.engine.checkpoint.module_state import RUNNER, base_of
from recompute.engine.rng import RngState


@dataclass(frozen=True)
class Norm:
    """``rms_norm(x, weight, eps, casting)``; ``weight`` is the attribute's name, or None."""

    weight: str | None
    eps: float
    casting: str

    def weight_of(self, module: nn.Module) -> Tensor | None:
        return None if self.weight is None else getattr(module, self.weight)


@dataclass(frozen=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, each the name of a submodule; no ``up``: ``gate`` gives both halves."""

    gate: str
    up: str | None
    down: str
    activation: str


@dataclass(frozen=True)
class PreNormLayer:
    """``h = x + attention(norm(x), ...)``, then ``h + mlp(mlp_norm(h))``, each the name of a submodule."""

    norm: str
    attention: str
    mlp_norm: str
    mlp: str
    parameters: tuple[str, ...]
    """Of forward, in order; the first is x."""
    defaults: tuple[Any, ...]
    """Of the last of them."""
    passed: tuple[tuple[int | str, str | None], ...]
    """By position or name of an argument of attention, the parameter that it is; None: the norm's output."""
    takes_more: bool
    """Whether keywords of other names are passed on to attention, too."""
    output: int | None
    """Which of attention's outputs is added, if it gives several."""
    dropouts: tuple[str, ...]
    """Submodules that leave everything as it is, as long as they drop nothing."""

    def computed(self, module: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norms and the MLP, which something else may compute."""
        norm, mlp_norm, mlp = (module._modules[name] for name in (self.norm, self.mlp_norm, self.mlp))
        return norm, mlp_norm, mlp  # type: ignore[return-value]

    def is_as_found(self, module: nn.Module) -> bool:
        return all(_drops_nothing(getattr(module, name)) for name in self.dropouts)

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[nn.Module, Tensor], Tensor]]:
        """x, and what calls attention on the norm's output, for forward's arguments."""
        given = dict(zip(self.parameters[len(self.parameters) - len(self.defaults) :], self.defaults, strict=True))
        given |= zip(self.parameters, args, strict=False)
        given |= kwargs

        def call(attention: nn.Module, normed: Tensor) -> Tensor:
            values = [(key, normed if name is None else given[name]) for key, name in self.passed]
            positional = [value for key, value in values if isinstance(key, int)]
            named = {key: value for key, value in values if isinstance(key, str)}
            if self.takes_more:
                named |= {key: value for key, value in kwargs.items() if key not in self.parameters}
            result = attention(*positional, **named)
            return result if self.output is None else result[self.output]

        return given[self.parameters[0]], call


def find_norm(module: nn.Module) -> Norm | None:
    """The root-mean-square norm that ``module`` computes, if that is all it does."""
    if type(module) is nn.RMSNorm:
        if len(module.normalized_shape) != 1 or module.eps is None:
            return None
        return Norm(None if module.weight is None else "weight", module.eps, "none")
    traced = _trace(module)
    if traced is None:
        return None
    for pattern, casting in _norm_patterns():
        if traced.formula == pattern.formula:
            numbers = dict(zip(pattern.numbers, traced.numbers, strict=True))
            eps = numbers.pop(_EPS)
            if all(expected == found for expected, found in numbers.items()):
                return Norm(traced.names[0] if traced.names else None, eps, casting)
    return None


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The gated MLP that ``module`` computes, if that is all it does."""
    traced = _trace(module)
    if traced is None:
        return None
    match traced.formula:
        case ("module", int(down), ("mul", left, right)):
            pass
        case _:
            return None
    for factors in ((left, right), (right, left)):
        match factors:
            case (("module", int(act), ("module", int(gate), ("input", 0))), ("module", int(up), ("input", 0))):
                return GatedMLP(*(traced.names[index] for index in (gate, up, down, act)))
            case (("module", int(act), ("getitem", chunks, 0)), ("getitem", others, 1)) if chunks == others:
                match chunks:
                    case ("chunk", ("module", int(both), ("input", 0)), 2, -1):
                        return GatedMLP(traced.names[both], None, traced.names[down], traced.names[act])
    return None


def find_activation(module: nn.Module) -> str | None:
    """``silu``, ``gelu`` or ``gelu_tanh``, if ``module`` computes that and leaves its input as it is."""
    traced = _trace(module)
    match None if traced is None else traced.formula:
        case ("silu", ("input", 0)):
            return "silu"
        case ("gelu", ("input", 0)) | ("gelu", ("input", 0), "none"):
            return "gelu"
        case ("gelu", ("input", 0), "tanh"):
            return "gelu_tanh"
    return None


def find_pre_norm_layer(module: nn.Module) -> PreNormLayer | None:
    """The decoder layer that ``module`` computes, if that is all it does: two norms, and after each a residual sum.

    Read off its trace, and then checked by running it with stand-ins for its four submodules.
    """
    parameters = list(inspect.signature(base_of(module).forward).parameters.values())[1:]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    traced = _trace(module, _LayerTracer)
    if traced is None:
        return None
    match traced.formula:
        case ("add", ("module", int(mlp), ("module", int(mlp_norm), stream)), other) if stream == other:
            pass
        case ("add", other, ("module", int(mlp), ("module", int(mlp_norm), stream))) if stream == other:
            pass
        case _:
            return None
    output = None
    match stream:
        case ("add", ("input", 0), attended) | ("add", attended, ("input", 0)):
            if attended[0] == "getitem" and isinstance(attended[2], int):
                _, attended, output = attended
        case _:
            return None
    match attended:
        case ("module", int(attention), *arguments):
            pass
        case _:
            return None
    names = tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
    passed = tuple(_passed(place, argument, names) for place, argument in enumerate(arguments))
    norms = {source for _, source in passed if isinstance(source, int)}
    if len(norms) != 1 or any(source is _UNKNOWN for _, source in passed):
        return None
    (norm,) = norms
    layer = PreNormLayer(
        norm=traced.names[norm],
        attention=traced.names[attention],
        mlp_norm=traced.names[mlp_norm],
        mlp=traced.names[mlp],
        parameters=names,
        defaults=tuple(each.default for each in parameters if each.default is not each.empty),
        passed=tuple((key, None if source == norm else source) for key, source in passed if source is not _MORE),
        takes_more=any(source is _MORE for _, source in passed),
        output=output,
        dropouts=tuple(name for name, child in module.named_children() if _drops_nothing(child)),
    )
    return layer if _computes_that(module, layer) else None


_UNKNOWN = object()


def _passed(place: int, argument: Any, names: tuple[str, ...]) -> tuple[int | str, Any]:
    """An argument's position or name, and where it comes from: a parameter's name, a norm's number, or ``_MORE``."""
    key: int | str = place
    match argument:
        case ("keyword", str(key), argument):
            pass
    match argument:
        case ("input", int(index)):
            return key, names[index] if index < len(names) else _MORE if key == _MORE else _UNKNOWN
        case ("module", int(norm), ("input", 0)):
            return key, norm
    return key, _UNKNOWN


def _drops_nothing(module: nn.Module) -> bool:
    return type(module) is nn.Dropout and module.p == 0


class _StandIn(nn.Module):
    """In the place of a submodule: computes something else for each, and notes what it is given."""

    def __init__(self, place: int, output: int | None = None):
        super().__init__()
        self._place, self._output = place, output
        self.given: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append((args, kwargs))
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        y = torch.sin((self._place + 2) * x + self._place)
        return y if self._output is None else (*(y + 1 for _ in range(self._output)), y, None)


def _computes_that(module: nn.Module, layer: PreNormLayer) -> bool:
    """Whether the module's forward, with stand-ins for its submodules, gives what ``layer`` says, bit for bit."""
    required = len(layer.parameters) - len(layer.defaults)
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-1, 1, 6, dtype=torch.float64, device="cpu").view(1, 2, 3)
        for count in (required, len(layer.parameters)):  # with what must be given, and with all that may be
            kwargs: dict[str, Any] = {name: object() for name in layer.parameters[1:count]}
            if layer.takes_more:
                kwargs["something_else"] = object()
            parts = [_StandIn(place, layer.output if place == 1 else None) for place in range(4)]
            given, attend = layer.split((x,), kwargs)
            h = given + attend(parts[1], parts[0](given))
            expected, expected_calls = h + parts[3](parts[2](h)), parts[1].given
            parts = [_StandIn(place, layer.output if place == 1 else None) for place in range(4)]
            stand_in = _copy_of(module, module.training)
            names = (layer.norm, layer.attention, layer.mlp_norm, layer.mlp)
            stand_in.__dict__["_modules"] = vars(stand_in)["_modules"] | dict(zip(names, parts, strict=True))
            try:
                found = base_of(module).forward(stand_in, x, **kwargs)
            except Exception:
                # Any forward may be asked, and may raise anything at the stand-ins: it is not recognized.
                return False
            calls = parts[1].given
            if not isinstance(found, Tensor) or not torch.equal(found, expected) or len(calls) != len(expected_calls):
                return False
            if not all(map(_is_same_call, calls, expected_calls)):
                return False
    return True


def _is_same_call(call: tuple[tuple, dict], other: tuple[tuple, dict]) -> bool:
    (args, kwargs), (others, other_kwargs) = call, other
    if len(args) != len(others) or kwargs.keys() != other_kwargs.keys():
        return False
    pairs = [*zip(args, others, strict=True), *((value, other_kwargs[key]) for key, value in kwargs.items())]
    return all(
        torch.equal(given, expected)
        if isinstance(given, Tensor) and isinstance(expected, Tensor)
        else given is expected
        for given, expected in pairs
    )


_EPS = 0.1234567  # stands for any epsilon in the patterns


class _Llama(nn.Module):
    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + _EPS)
        return hidden.to(x.dtype) if self.weight is None else self.weight * hidden.to(x.dtype)


class _Gemma(_Llama):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        return hidden.type_as(x) if self.weight is None else (hidden * (1.0 + self.weight.float())).type_as(x)


@functools.cache
def _norm_patterns() -> tuple[tuple[_Traced, str], ...]:
    modules = [(_Llama(True), "llama"), (_Gemma(True), "gemma"), (_Llama(False), "llama")]
    return tuple((traced, casting) for module, casting in modules if (traced := _trace(module)) is not None)


@dataclass(frozen=True)
class _Traced:
    """A module's result as a nested tuple, in which numbers and attributes stand by position: names don't matter."""

    formula: Any
    names: tuple[str, ...]
    numbers: tuple[float, ...]


def _trace(module: nn.Module, tracer: type[_Tracer] | None = None) -> _Traced | None:
    """None where the module's forward is more than one expression of its one argument, the same in training and not.

    Nothing of the module is changed, whatever its forward does. tracer: one that takes other arguments, too.
    """
    if is_decorated(module) and getattr(vars(module).get(RUNNER), "runner", module) is not None:
        return None  # its forward runs a policy of its own
    try:
        if tracer is None and len(inspect.signature(base_of(module).forward).parameters) != 2:
            return None
    except ValueError:  # a builtin's
        return None
    trained, evaluated = (_trace_once(module, training, tracer or _Tracer) for training in (True, False))
    return trained if trained == evaluated else None


def _trace_once(module: nn.Module, training: bool, tracer: type[_Tracer]) -> _Traced | None:
    stand_in = _copy_of(module, training)
    before = fingerprint(vars(stand_in))
    try:
        with RngState().replayed():
            graph = tracer().trace(stand_in)
    except Exception:
        # Any forward may be asked, and may raise anything at a proxy that it takes for a tensor: it is not recognized.
        return None
    if fingerprint(vars(stand_in)) != before:
        return None  # it notes something on itself, which what stands in for it would not
    return _Formula().of(graph)


def _copy_of(module: nn.Module, training: bool) -> nn.Module:
    """A module of the same class and attributes, without a policy."""
    copy = object.__new__(base_of(module))
    copy.__dict__.update(snapshot(vars(module)), training=training)
    if not is_decorated(module):
        copy.__dict__.pop(RUNNER, None)
    return copy


def is_decorated(module: nn.Module) -> bool:
    """Whether the class of ``module`` is decorated with a policy."""
    return hasattr(type(module), "_recompute_decorated")


class _Proxy(fx.Proxy):
    """Refuses to be changed in place, which a trace would take for a new value."""

    def _in_place(self, other: Any) -> Any:
        raise fx.proxy.TraceError("an operation in place")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = __ifloordiv__ = __imod__ = _in_place


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


_MORE = "**"  # stands for the keywords that a forward takes besides those it names


class _LayerTracer(_Tracer):
    """Of forwards with any named arguments, which fx itself traces only where they are not wrapped."""

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        names = [_MORE if each.kind is each.VAR_KEYWORD else each.name for each in parameters]
        proxies = {name: self.create_proxy("placeholder", name.replace(_MORE, "more"), (), {}) for name in names}
        return lambda root: root_fn(root, *list(proxies.values())[:1], **dict(list(proxies.items())[1:])), [self.root]

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if _drops_nothing(m) else super().call_module(m, forward, args, kwargs)


# By identity, as a function of the user's may bear an op's name. None of these draws or changes anything.
_FUNCTIONS = {
    getattr: "getattr",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.getitem: "getitem",
    operator.neg: "neg",
    operator.pow: "pow",
    torch.add: "add",
    torch.mul: "mul",
    torch.pow: "pow",
    torch.mean: "mean",
    torch.rsqrt: "rsqrt",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.silu: "silu",
    F.relu: "relu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
}
_METHODS = {"to", "float", "type_as", "pow", "mean", "rsqrt", "mul", "add", "sub", "sigmoid", "tanh", "chunk"}


class _Formula:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[float] = []
        self.inputs = 0

    def of(self, graph: fx.Graph) -> _Traced | None:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "output":
                result = node.args[0]
                formula = values[result] if isinstance(result, fx.Node) else None
                return _Traced(formula, tuple(self.names), tuple(self.numbers))
            values[node] = self._node(node, values)
        return None

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args = [self._argument(value, values) for value in node.args]
        keywords = {key: self._argument(value, values) for key, value in node.kwargs.items()}
        if node.op == "call_module":
            return ("module", self._index(str(node.target)), *args, *(("keyword", *item) for item in keywords.items()))
        args += keywords.values()
        match node.op:
            case "placeholder":
                self.inputs += 1
                return ("input", self.inputs - 1)
            case "get_attr":
                return ("attribute", self._index(str(node.target)))
            case "call_method":
                name = node.target if node.target in _METHODS else operator.methodcaller(str(node.target))
            case _:
                name = _FUNCTIONS.get(node.target, node.target)  # type: ignore[arg-type]
        match name, args:
            case "getattr", (value, "dtype"):
                return ("dtype", value)
            case "float", (value,):
                return ("to", value, torch.float32)
            case "type_as", (value, other):
                return ("to", value, ("dtype", other))
            case (("mul" | "add"), (left, right)):
                return (name, *sorted((left, right), key=repr))
            case (("silu" | "relu"), (value, *rest)):
                return (node.target, value) if any(rest) else (name, value)  # in place, or not
        return (name, *args)

    def _argument(self, value: Any, values: dict[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, float):
            self.numbers.append(value)
            return ("number", len(self.numbers) - 1)
        return tuple(value) if isinstance(value, (list, tuple)) else value

    def _index(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1
