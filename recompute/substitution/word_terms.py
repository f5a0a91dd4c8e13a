"""Elementwise functions of softmaxes as sums of terms: a factor, times a probability, times a logarithm.

Entropies and divergences are such sums, however people write them. A term's key is (probability, logarithm). The id of
its logits names a probability. A logarithm is that of a probability, or of a mixture of several. 0 stands for none: the
term of (0, 0) is a number. A total variation has the distance of two probabilities, ``|p - q|``, in place of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.substitution import known_functions as torchs

Mixture = frozenset[tuple[int, float]]
"""Probabilities and their weights, which add up to 1."""
Distance = frozenset[int]
"""The distance of two probabilities, by their logits."""
Terms = dict[tuple["int | Distance", "int | Mixture"], float]


def number(value: float) -> Terms:
    return {(0, 0): value}


def of_softmax(function: Any, name: int) -> Terms:
    """The terms of ``function``, one of ``SOFTMAXES``. name: the id of the logits."""
    return {(0, name) if function in torchs.LOG_SOFTMAXES else (name, 0): 1.0}


def combined(function: Any, *given: Terms | None) -> Terms | None:
    """The terms of ``function``, elementwise, of such sums; None if its result is no such sum."""
    rule = _RULES.get(function)
    return None if rule is None or len(given) != rule.__code__.co_argcount else _of_known(rule, *given)


def divergence(log_input: Terms | None, target: Terms | None, log_target: bool) -> Terms | None:
    """The terms of ``kl_div``: ``target * (log(target) - input)``."""
    probability = _of_known(_exponential, target) if log_target else target
    logarithm = target if log_target else _of_known(_logarithm, target)
    return _of_known(_product, probability, _of_known(_difference, logarithm, log_input))


def log_of_sum(*logarithms: Terms | None) -> Terms | None:
    """The terms of a ``logsumexp`` of several logarithms."""
    total: Terms | None = {}
    for each in logarithms:
        total = _of_known(_sum, total, _of_known(_exponential, each))
    return _of_known(_logarithm, total)


def renamed(terms: Terms | None, names: dict[int, int]) -> Terms | None:
    """The same terms of other logits. names: the new id of each."""

    def new(log: int | Mixture) -> int | Mixture:
        return names[log] if isinstance(log, int) else frozenset((names[each], weight) for each, weight in log)

    names = {0: 0, **names}
    found: Terms = {}
    for (p, log), factor in (terms or {}).items():
        probability = names[p] if isinstance(p, int) else frozenset(names[each] for each in p)
        found = _sum(found, {(probability, new(log)): factor})
    return None if terms is None else found


class KnownSum(NamedTuple):
    """A sum over words: ``factor`` times a quantity that kernels compute, plus ``offset``."""

    of: tuple[int, ...]
    """The logits: one for -entropy, p and q for a divergence."""
    factor: float
    offset: float
    kind: str = "kl"
    """The divergence: "kl" for KL(p, q), "jsd", or "total_variation"."""
    beta: float = 0.5
    """The weight of the second in the mixture of a Jensen-Shannon divergence."""


def known_sum(terms: Terms | None, words: int, tolerance: float) -> KnownSum | None:
    """tolerance: the relative rounding of factors that people give."""
    if terms is None:
        return None
    by_probability: dict[Any, dict[int | Mixture, float]] = {}
    offset = 0.0
    for (probability, log), factor in terms.items():
        if log != 0 or not isinstance(probability, int):
            by_probability.setdefault(probability, {})[log] = factor
        else:
            offset += factor if probability else factor * words
    if not by_probability or 0 in by_probability:
        return None
    (p, of_p), *others = by_probability.items()
    if not others and not isinstance(p, int):
        return KnownSum(tuple(p), 2 * of_p[0], offset, "total_variation") if [*of_p] == [0] else None
    if not others:
        return _of_one(p, of_p, offset)
    ((q, of_q),) = others if len(others) == 1 else [(0, {})]
    (mixture, x), (other, y) = _own_and_mixture(p, of_p), _own_and_mixture(q, of_q)
    weights = dict(mixture or ())
    if mixture is None or mixture != other or set(weights) != {p, q} or x + y == 0:
        return None
    is_balanced = math.isclose(x / (x + y), weights[p], rel_tol=tolerance)
    return KnownSum((p, q), x + y, offset, "jsd", weights[q]) if is_balanced else None


def is_half_of_known(terms: Terms | None) -> bool:
    """Whether this is a factor times KL(p, m), of a mixture m: another such may make a known sum of it."""
    of = {probability for probability, log in terms if log != 0} if terms else set()
    if terms is None or len(of) != 1:
        return False
    (p,) = of
    return (
        isinstance(p, int)
        and _own_and_mixture(p, {log: factor for (_, log), factor in terms.items() if log != 0})[0] is not None
    )


def _of_one(p: int, logs: dict[int | Mixture, float], offset: float) -> KnownSum | None:
    own = logs.get(p)
    others = [(log, factor) for log, factor in logs.items() if log != p]
    if own is None or len(others) > 1:
        return None
    if not others:
        return KnownSum((p,), own, offset)
    ((q, factor),) = others
    return KnownSum((p, q), own, offset) if isinstance(q, int) and math.isclose(factor, -own) else None


def _own_and_mixture(p: int, logs: dict[int | Mixture, float]) -> tuple[Mixture | None, float]:
    """m and x of ``x · (log(p) - log(m))``; None and 0 for other terms."""
    mixtures = [log for log in logs if isinstance(log, frozenset)]
    if len(logs) != 2 or len(mixtures) != 1 or p not in logs or not math.isclose(logs[p], -logs[mixtures[0]]):
        return None, 0.0
    return mixtures[0], logs[p]


def _of_known(rule: Callable[..., Terms | None], *given: Terms | None) -> Terms | None:
    return None if any(each is None for each in given) else rule(*given)


def _sum(a: Terms, b: Terms) -> Terms:
    found = {key: a.get(key, 0.0) + b.get(key, 0.0) for key in [*a, *(key for key in b if key not in a)]}
    return {key: factor for key, factor in found.items() if abs(factor) > 1e-12}


def _product(a: Terms, b: Terms) -> Terms | None:
    found: Terms = {}
    for (p, log), factor in a.items():
        for (q, other), another in b.items():
            if (p and q) or (log and other):
                return None
            found = _sum(found, {(p or q, log or other): factor * another})
    return found


def _negation(a: Terms) -> Terms:
    return {key: -factor for key, factor in a.items()}


def _difference(a: Terms, b: Terms) -> Terms:
    return _sum(a, _negation(b))


def _exponential(a: Terms) -> Terms | None:
    factor = math.exp(a.get((0, 0), 0.0))
    logs = [(key, times) for key, times in a.items() if key != (0, 0)]
    if len(logs) != 1 or logs[0][0][0] != 0 or logs[0][1] != 1.0:
        return None
    log = logs[0][0][1]
    return {(each, 0): weight * factor for each, weight in ([(log, 1.0)] if isinstance(log, int) else log)}


def _logarithm(a: Terms) -> Terms | None:
    weights = {p: factor for (p, log), factor in a.items() if p and isinstance(p, int) and log == 0 and factor > 0}
    if not a or len(weights) < len(a):
        return None
    total = sum(weights.values())
    parts = frozenset((p, factor / total) for p, factor in weights.items())
    log: int | Mixture = parts if len(parts) > 1 else next(iter(parts))[0]
    return _sum({(0, log): 1.0}, number(math.log(total)))


def _absolute(a: Terms) -> Terms | None:
    if len(a) != 2 or sum(a.values()) != 0 or not all(p and isinstance(p, int) and log == 0 for p, log in a):
        return None
    return {(frozenset(p for p, _ in a if isinstance(p, int)), 0): max(a.values())}


_RULES: dict[Any, Callable[..., Terms | None]] = torchs.by_function(
    {
        torchs.PRODUCTS: _product,
        torchs.EXPONENTIALS: _exponential,
        torchs.LOGARITHMS: _logarithm,
        torchs.ABSOLUTES: _absolute,
        torchs.NEGATIONS: _negation,
        torchs.ADDITIONS: _sum,
        torchs.DIFFERENCES: _difference,
        Tensor.__rsub__: lambda a, b: _difference(b, a),
        torchs.DIVISIONS: lambda a, b: _product(a, number(1 / b[0, 0])) if [*b] == [(0, 0)] else None,
        torch.logaddexp: lambda a, b: log_of_sum(a, b),
    }
)
ELEMENTWISE = frozenset(_RULES.keys() | {Tensor.square, torch.square})
