"""Fuses, in the graph of a decoder layer's own forward, what ``KernelLayerRunner`` computes by fewer kernels.

In the graph norms and MLPs are calls of their own kernels. Where all that reads an RMSNorm are Linears,
``norm_linears`` takes their places; ``twin_layer_norm`` those of two LayerNorms of one tensor; ``residual_mlp``,
``add_rms_norm`` or ``add_layer_norm`` those of what comes after attention. These are the kernels that the runner itself
calls. Captured code compares each op, so a graph in which something else is fused than the runner fuses is never run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node
from torch.nn import functional as F

from recompute.compiled.captured_graph import Fusion
from recompute.kernels.add_layer_norm import add_layer_norm
from recompute.kernels.add_rms_norm import add_rms_norm
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.layer_norm import layer_norm
from recompute.kernels.mlp import mlp
from recompute.kernels.norm_linears import norm_linears
from recompute.kernels.residual_mlp import residual_mlp
from recompute.kernels.rms_norm import rms_norm
from recompute.kernels.twin_layer_norm import twin_layer_norm


def _fuse(graph: Graph) -> None:
    for node in _calls(graph, getattr):  # of what a runner asked of a tensor, as its device
        if not node.users:
            graph.erase_node(node)
    for node in _calls(graph, F.dropout):
        if _drops_nothing(node):
            node.replace_all_uses_with(_arguments(node)[0])
            graph.erase_node(node)
    for norm in _calls(graph, *_WITH_SUM):
        _fuse_with_sum(graph, norm)
    for norm in _calls(graph, rms_norm):
        _fuse_with_linears(graph, norm)
    _fuse_twins(graph)
    for norm in _calls(graph, layer_norm):
        _fuse_with_stream(graph, norm)
    _delay_sums(graph)
    _sort_sums(graph)


def _calls(graph: Graph, *functions: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in functions]


_ADDITIONS = (operator.add, operator.iadd)
_WITH_SUM: dict[Any, Any] = {rms_norm: add_rms_norm, layer_norm: add_layer_norm}
"""The norms, and the kernels that compute the sum in front as well."""
_SUMMED = tuple(_WITH_SUM.values())


def _fuse_with_sum(graph: Graph, norm: Node) -> None:
    """``h = attended + x``, and the norm of ``h``; with the MLP of that and the sum of both, if there are these."""
    h, *settings = _arguments(norm)
    if not _is_call(h, *_ADDITIONS):
        return
    x, attended = h.args if _is_given(h.args[0]) else h.args[::-1]
    if not _is_given(x):
        return
    gated: Any = _only(norm.users)
    total: Any = _only(gated.users) if norm.target is rms_norm and _is_call(gated, gated_mlp) else None
    if _is_call(total, *_ADDITIONS) and set(total.args) == {h, gated} and set(h.users) == {norm, total}:
        _, *weights, activation = gated.args
        weight, *others = settings
        arguments = (attended, x, weight, *weights, *others, activation)
        _replace(graph, total, residual_mlp, arguments, gated.kwargs)
        for node in (gated, norm, h):
            graph.erase_node(node)
        return
    with graph.inserting_before(h):
        both = graph.call_function(_WITH_SUM[norm.target], (attended, x, *settings))
    _replace(graph, norm, operator.getitem, (both, 0))
    _replace(graph, h, operator.getitem, (both, 1))


def _fuse_with_linears(graph: Graph, norm: Node) -> None:
    """The norm of a layer's input, the Linears that read it, and the sum of the input and what attention gives."""
    x, weight, *settings = _arguments(norm)
    linears = list(norm.users)
    if not _is_given(x) or not linears or not all(_is_call(each, F.linear) for each in linears):
        return
    if any(each.kwargs or len(each.args) != 3 or each.args[0] is not norm for each in linears):
        return  # as nn.Linear does not call it
    weights, biases = zip(*[each.args[1:] for each in linears], strict=True)
    with graph.inserting_before(norm):
        both = graph.call_function(norm_linears, (x, weight, weights, biases, *settings))
        outputs = graph.call_function(operator.getitem, (both, 0))
        stream = graph.call_function(operator.getitem, (both, 1))
    for index, linear in enumerate(linears):
        _replace(graph, linear, operator.getitem, (outputs, index))
    graph.erase_node(norm)
    _use_as_stream(x, stream)


def _fuse_twins(graph: Graph) -> None:
    """Two LayerNorms of a layer's input."""
    norms = [norm for norm in _calls(graph, layer_norm) if _is_given(_arguments(norm)[0])]
    if len(norms) != 2:
        return
    (x, *parameters, eps), (other_x, *other_parameters, other_eps) = map(_arguments, norms)
    are_given = all(each is None or _is_given(each) for each in other_parameters)
    if other_x is not x or other_eps != eps or not are_given:
        return
    with graph.inserting_before(norms[0]):
        both = graph.call_function(twin_layer_norm, (x, *parameters, *other_parameters, eps))
        stream = graph.call_function(operator.getitem, (both, 2))
    for place, norm in enumerate(norms):
        _replace(graph, norm, operator.getitem, (both, place))
    _use_as_stream(x, stream)


def _fuse_with_stream(graph: Graph, norm: Node) -> None:
    """The LayerNorm of a layer's input, whose backward adds the gradient of the input in the sum.

    If two LayerNorms read it, the second reads it from the first, and adds first.
    """
    x, *settings = _arguments(norm)
    if not _is_given(x) and not _is_stream(x):
        return
    with graph.inserting_before(norm):
        both = graph.call_function(add_layer_norm, (x, None, *settings))
        stream = graph.call_function(operator.getitem, (both, 1))
    _replace(graph, norm, operator.getitem, (both, 0))
    _use_as_stream(x, stream, layer_norm)


def _is_stream(x: Any) -> bool:
    """Whether x is the stream as an op gives it back."""
    if not _is_call(x, operator.getitem):
        return False
    both, place = x.args
    return _is_call(both, twin_layer_norm) if place == 2 else place == 1 and _is_call(both, norm_linears, *_SUMMED)


def _use_as_stream(x: Node, stream: Node, *norms: Any) -> None:
    """norms: what reads x of the stream beside sums."""
    sums = residual_mlp, *_SUMMED, *_ADDITIONS, *norms
    x.replace_all_uses_with(stream, lambda user: user.target in sums and user is not stream.args[0])


def _delay_sums(graph: Graph) -> None:
    """Move sums that read the stream to where they are read, which is where the runner adds: after the last norm."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for total in _calls(graph, operator.add):
        if any(_is_stream(each) for each in total.all_input_nodes) and total.users:
            min(total.users, key=places.__getitem__).prepend(total)


def _sort_sums(graph: Graph) -> None:
    """Have sums begin with the stream and end with the MLP, as the runner's do, whichever way round the layer adds."""
    for total in _calls(graph, operator.add):
        if not total.kwargs and _rank(total.args[0]) > _rank(total.args[1]):
            total.args = total.args[::-1]


def _rank(term: Any) -> int:
    if _is_call(term, mlp, gated_mlp):
        return 3
    is_sum = _is_call(term, operator.add) and any(_rank(each) != 2 for each in term.args)
    return 0 if _is_stream(term) else 1 if is_sum else 2


def _replace(graph: Graph, node: Node, target: Any, args: tuple, kwargs: Any = None) -> Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _arguments(node: Node) -> Any:
    return node.args


def _is_given(value: Any) -> bool:
    """Whether a value is an input of the graph."""
    return isinstance(value, Node) and value.op == "placeholder"


def _is_call(node: Any, *functions: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in functions


def _only(users: Iterable[Node]) -> Node | None:
    found = list(users)
    return found[0] if len(found) == 1 else None


def _drops_nothing(node: Node) -> bool:
    match (node.args, node.kwargs):  # as nn.Dropout calls it
        case ((_, p, _, False), {}):
            return bool(p == 0)
    return False


FUSION = Fusion((rms_norm, layer_norm, gated_mlp, mlp), _fuse)
"""Of a decoder layer for which kernels stand in."""
