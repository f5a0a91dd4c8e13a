"""Calculates a step of a model with many equal layers from steps with few of them.

Where layers are equal, all numbers of bytes are linear in how many layers there are, and in a layer's place among them.
Steps with three layers and with four give these lines. A step with five must lie on them exactly, or all layers run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from recompute.engine.reachable_objects import base_of
from recompute.errors import ModelError
from recompute.estimation.simulation import MomentMemory, SimulatedStep
from recompute.policy.rules import Policy

_FEW = 3, 4, 5
_WORTH_IT = 2 * sum(_FEW)

AliveNBytes = list[tuple[int, int]]
"""``MomentMemory.alive`` as a sorted list: bytes of gradients, and the most bytes alive beside them."""


class LayerStack(NamedTuple):
    """Layers that are equal but for their place."""

    path: str
    layers: nn.ModuleList


def find_stack(model: nn.Module, policy: Policy | None) -> LayerStack | None:
    """The longest list of equal layers that the policy treats alike; None if there is none, or it is short."""
    if policy is not None and any(_tells_layers_apart(rule) for rule in policy.rules):
        return None
    lists = [LayerStack(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for stack in sorted(lists, key=lambda stack: -len(stack.layers)):
        if len(stack.layers) >= _WORTH_IT and len({structure_of(layer) for layer in stack.layers}) == 1:
            return stack
    return None


def extrapolated_step(stack: LayerStack, simulate: Callable[[], SimulatedStep]) -> SimulatedStep | None:
    """What ``simulate()`` would give, from runs of it with few layers; None where these are not on a line."""
    steps = []
    for count in _FEW:
        with shortened_list(stack.layers, count):
            try:
                steps.append(simulate())
            except ModelError:  # the model has the number of its layers elsewhere, too
                return None
    less, more, check = steps
    try:
        if _continued(stack.path, less, more, _FEW[2]) != check:
            return None
        return _continued(stack.path, less, more, len(stack.layers))
    except _NotLinear:
        return None


class _NotLinear(Exception):
    """The moments of the steps do not correspond."""


def _tells_layers_apart(rule: Any) -> bool:
    return rule.layers is not None or any(re.search(r"\d", glob) for glob in rule.match)


def structure_of(module: nn.Module) -> Any:
    """A value that is equal for modules that run the same ops on tensors of the same shapes, as far as can be seen."""
    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, plain) and not re.search(r"idx|index|layer_id", name)
    ]
    tensors = [
        (name, None if each is None else (each.shape, each.dtype, each.requires_grad))
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is None or isinstance(each, Tensor)
    ]
    children = [(name, None if child is None else structure_of(child)) for name, child in module._modules.items()]
    return base_of(module), tuple(attributes), tuple(tensors), tuple(children)


@contextmanager
def shortened_list(layers: nn.Module, count: int) -> Iterator[None]:
    """Inside, the list has its first ``count`` layers alone."""
    whole = layers._modules
    layers._modules = dict(list(whole.items())[:count])
    try:
        yield
    finally:
        layers._modules = whole


def _continued(path: str, less: SimulatedStep, more: SimulatedStep, count: int) -> SimulatedStep:
    """The step with ``count`` layers, from one with three and one with four."""
    old = {moment.name: sorted(moment.alive.items()) for moment in less.moments}
    new = {moment.name: sorted(moment.alive.items()) for moment in more.moments}
    if len(old) + 2 != len(new):
        raise _NotLinear
    steps = count - _FEW[1]

    def line(before: AliveNBytes, after: AliveNBytes, times: int) -> AliveNBytes:
        if len(before) != len(after):
            raise _NotLinear
        return [
            tuple(b + times * (b - a) for a, b in zip(first, second, strict=True))  # type: ignore[misc]
            for first, second in zip(before, after, strict=True)
        ]

    def find(table: dict[str, AliveNBytes], name: str) -> AliveNBytes:
        if name not in table:
            raise _NotLinear
        return table[name]

    def of_layer(kind: str, index: int) -> AliveNBytes:
        def named(number: int) -> str:
            return f"{kind}{path}.{number}"

        if index == 0:
            return line(find(old, named(0)), find(new, named(0)), steps)
        if index == count - 1:
            return line(find(old, named(2)), find(new, named(3)), steps)
        second = line(find(old, named(1)), find(new, named(1)), steps)
        along = line(find(new, named(1)), find(new, named(2)), 0), find(new, named(1))
        return [
            tuple(s + (index - 1) * (b - a) for s, b, a in zip(*rows, strict=True))  # type: ignore[misc]
            for rows in zip(second, *along, strict=True)
        ]

    moments: list[MomentMemory] = []
    done: set[str] = set()
    for name in new:
        kind, is_layer, _ = name.partition(f"{path}.")
        if not is_layer:
            moments.append(MomentMemory(name, dict(line(find(old, name), new[name], steps))))
        elif kind not in done:
            done.add(kind)
            order = range(count) if kind.startswith("forward") else reversed(range(count))
            moments += [MomentMemory(f"{kind}{path}.{index}", dict(of_layer(kind, index))) for index in order]
    logits = more.logits_peak_nbytes + steps * (more.logits_peak_nbytes - less.logits_peak_nbytes)
    return SimulatedStep(tuple(moments), _held(path, less, more, count), logits)


def _held(path: str, less: SimulatedStep, more: SimulatedStep, count: int) -> dict[str, int]:
    """What each module holds. Each layer except the first and the last one holds what the second one does."""
    found: dict[str, int] = {}
    for name, nbytes in more.held.items():
        rest = re.fullmatch(rf"{re.escape(path)}\.(\d+)(.*)", name)
        if rest is None:
            found[name] = nbytes + (count - _FEW[1]) * (nbytes - less.held.get(name, 0))
            continue
        index, inside = int(rest[1]), rest[2]
        indices = [0] if index == 0 else [count - 1] if index == 3 else range(1, count - 1) if index == 1 else []
        found |= {f"{path}.{each}{inside}": nbytes for each in indices}
    return found
