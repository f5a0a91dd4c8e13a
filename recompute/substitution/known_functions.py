"""The functions of torch's that lazy tensors know. Each set holds one function under all of its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Rules = dict[Any, Callable[..., Any]]
"""Rules for functions, by the functions or by sets of these."""


def _named(*names: str) -> frozenset[Any]:
    spaces = Tensor, torch, F, torch.special
    return frozenset(getattr(space, name) for name in names for space in spaces if hasattr(space, name))


def by_function(rules: Rules) -> Rules:
    """The same rules, with a key for each function."""
    pairs = [(key if isinstance(key, frozenset) else {key}, rule) for key, rule in rules.items()]
    return {function: rule for functions, rule in pairs for function in functions}


PRODUCTS = _named("mul", "__mul__", "__rmul__", "multiply")
DIVISIONS = _named("div", "__truediv__", "divide")
ADDITIONS = _named("add", "__add__", "__radd__")
DIFFERENCES = _named("sub", "__sub__", "subtract")
NEGATIONS = _named("neg", "__neg__", "negative")
ABSOLUTES = _named("abs", "__abs__", "absolute")
EXPONENTIALS = _named("exp")
LOGARITHMS = _named("log")
TANHS = _named("tanh")
LINEAR = PRODUCTS | DIVISIONS | ADDITIONS | DIFFERENCES | NEGATIONS
SCALINGS = PRODUCTS | DIVISIONS | TANHS
"""Functions that scale logits, or are a step of a cap on them."""
LOG_SOFTMAXES = _named("log_softmax")
SOFTMAXES = LOG_SOFTMAXES | _named("softmax")

RESHAPES = _named("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
MOVES = RESHAPES | {Tensor.__getitem__, Tensor.contiguous, Tensor.detach}
"""Functions that leave words where they are, if the last dimension stays whole."""
_TRANSPOSES: Any = Tensor.mT, Tensor.T
PERMUTATIONS = _named("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis")
PERMUTATIONS |= {each.__get__ for each in _TRANSPOSES}
UNBINDS = _named("unbind")  # which iterating over a tensor calls
CHUNKS = _named("chunk")
ROWS = UNBINDS | CHUNKS | _named("split")
CASTS = frozenset({Tensor.float, Tensor.to, Tensor.type})

GATHERS = _named("gather")
LOGSUMEXPS = _named("logsumexp")
TOPKS = _named("topk", "max")
SUMS = _named("sum")
TOTALS = SUMS | _named("mean")
REDUCTIONS = TOTALS | LOGSUMEXPS | _named("argmax", "amax")
"""Functions that make one number of a row."""
OF_SCORES = SOFTMAXES | GATHERS | TOPKS | REDUCTIONS
"""Functions of logits that have taken all steps of a cap, or none."""
