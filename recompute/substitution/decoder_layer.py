"""Kernels for pre-norm decoder layers: ``h = x + attention(norm(x))``, then ``h + mlp(mlp_norm(h))``.

``layer_formula`` finds them, and those that differ a little.

Attention runs its own code. It is given a ``LazyNorm``, so that ``kernels.norm_linears`` computes the norm and the
Linears that read it together. After attention ``kernels.residual_mlp`` computes the sum, the second norm and the MLP.
If the MLP is not a gated one, ``kernels.add_rms_norm`` computes the sum and the norm.

That is for RMSNorms. In the place of LayerNorms ``kernels.add_layer_norm`` computes the norm with the sum in front, and
in backward adds the gradient of the residual stream in the same pass. Where attention and the MLP read norms of the
same x, ``kernels.twin_layer_norm`` computes both. Such a layer is taken as a whole only if its MLP has a kernel of its
own: of another MLP all would be held that autograd saves, where a tape of the layer drops the activation. Then the
LayerNorms alone have kernels, on that tape.

Some layers have both, the kernels and a tape around them: see ``KernelLayerRunner.wants_tape``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recompute.compiled.captured_region import CaptureCache, CapturedRegion, StandIn
from recompute.compiled.runner import Forward, Runner
from recompute.engine.cut.op_policy import kernel_op_policy
from recompute.engine.reachable_objects import base_of
from recompute.engine.recipe_book import open_book
from recompute.engine.saved_tensors import RegionStatistics, is_inside_checkpoint
from recompute.engine.scopes import BypassScope
from recompute.engine.tape.recorder import TapeRegion
from recompute.substitution.feed_forward import KernelMLP, find_kernel_mlp, how_it_holds
from recompute.substitution.kernel_runner import KernelRunner, has_backward_hooks, is_hooked
from recompute.substitution.layer_formula import PreNormLayer, find_pre_norm_layer
from recompute.substitution.layer_fusion import FUSION
from recompute.substitution.lazy_tensors import values_of
from recompute.substitution.norm import (
    KernelLayerNorm,
    KernelNorm,
    KernelRMSNorm,
    LazyNorm,
    LearnedLinears,
    LinearOperands,
    Operands,
    find_norm,
)

_NOTHING = nullcontext()


@dataclass
class KernelLayerRunner(KernelRunner):
    layer: PreNormLayer
    norms: tuple[KernelNorm, KernelNorm]
    mlp: KernelMLP | None
    parts: tuple[weakref.ref[nn.Module], ...]
    """The norms and the MLP that were recognized."""
    stands_in_for_parts = True
    fusion = FUSION
    _linears: LearnedLinears = field(default_factory=LearnedLinears, init=False)
    _may_drop: bool = field(default=True, init=False)
    """Whether the last run recorded anything that the scope around could drop. The first run assumes that it does."""

    @classmethod
    def for_module(
        cls, statistics: RegionStatistics, fallback: Runner | None, module: nn.Module
    ) -> KernelLayerRunner | None:
        """The runner of ``module``, if it is a pre-norm layer whose norms the kernels compute."""
        layer = find_pre_norm_layer(module)
        if layer is None:
            return None
        parts = layer.parts(module)
        norm, mlp_norm = map(find_norm, parts[:2])
        if norm is None or mlp_norm is None:
            return None
        mlp = find_kernel_mlp(parts[2])
        if mlp is None and isinstance(mlp_norm, KernelLayerNorm):
            return None
        if layer.is_parallel and not all(isinstance(each, KernelLayerNorm) for each in (norm, mlp_norm)):
            return None  # RMSNorms are computed with a sum in front, or with what reads them
        return cls(statistics, fallback, layer, (norm, mlp_norm), mlp, tuple(map(weakref.ref, parts)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kinds = tuple([base_of(part) for reference in self.parts if (part := reference()) is not None])

    def capture(self, cache: CaptureCache) -> None:
        tape = TapeRegion(self.statistics, kernel_op_policy(), cache.plan_cache)
        stand_in = StandIn(self._run_forward, FUSION, is_taped=False)
        self.region = CapturedRegion(tape, cache, stand_in=stand_in)

    def _run_forward(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return self.run_kernel(forward.__self__, forward, args, kwargs)  # type: ignore[attr-defined]

    @property
    def wants_tape(self) -> bool:  # type: ignore[override]
        """Where a tape of the layer's own code held less than these kernels alone would.

        Of GPT-NeoX's layers, for one, a tape drops what rope gives: q and k are views of what one Linear gives for both
        and v, which is held anyway.
        """
        if self.layer.is_parallel or self.layer.after_attention or self.layer.after_mlp:
            return True
        if self.mlp is None or self.mlp.is_gated:
            return False
        return isinstance(self.norms[1], KernelLayerNorm) or self.mlp.dropout is not None

    @property
    def has_mlp(self) -> bool:  # type: ignore[override]
        return self._adds_to_mlp

    @property
    def variant(self) -> Hashable:
        return self._linears.count

    def _what(self) -> str:
        if self._has_twins:
            return "twin_layer_norm"
        first = "norm_linears" if isinstance(self.norms[0], KernelRMSNorm) else "add_layer_norm"
        if isinstance(self.norms[1], KernelLayerNorm):
            second = "add_layer_norm"
        elif self.mlp is not None and self._adds_to_mlp:
            second = f"residual_mlp{how_it_holds(self, self.mlp)}"
        else:
            second = "add_rms_norm"
        return ", ".join(dict.fromkeys((first, second)))

    @property
    def _adds_to_mlp(self) -> bool:
        """Whether one kernel computes the second norm, the MLP and both sums."""
        is_gated = self.mlp is not None and self.mlp.is_gated
        return is_gated and isinstance(self.norms[1], KernelRMSNorm) and self.layer.after_mlp is None

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        book = open_book()
        if book is None:
            return self._run(module, forward, args, kwargs)
        before = book.entered
        is_given = isinstance(args[0] if args else None, Tensor) and book.knows(args[0])
        with _NOTHING if self._may_drop or is_given or not args else BypassScope():
            result = self._run(module, forward, args, kwargs)
        self._may_drop = book.entered > before
        return result

    def _run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        x, attend = self.layer.split(args, kwargs)
        x = values_of(x)
        operands = self._operands(module, x) if self.layer.takes(args, kwargs) else None
        if operands is None:
            return forward(*args, **kwargs)
        norm, attention = self.norms[0], _child(module, self.layer.attention)
        if isinstance(norm, KernelLayerNorm):
            if self._has_twins:
                normed, y, stream = self._normed_twice(x, *operands)
                attended, returned = attend(attention, normed)
                return self._with(returned, self.layer.sum(stream, attended, _child(module, self.layer.mlp)(y)))
            normed, stream = self._normed_and_stream(0, x, operands[0])
            if self.layer.is_parallel:
                return self._side_by_side(module, normed, stream, attend, operands[1])
            attended, returned = attend(attention, normed)
        else:
            # A checkpoint runs this twice, and both runs must save the same tensors: so neither uses what was learned.
            linears = LearnedLinears() if is_inside_checkpoint() else self._linears
            normed = self._normed(norm, x, operands[0], linears)
            is_watched = any(map(has_backward_hooks, attention.modules()))
            attended, returned = attend(attention, normed.value() if is_watched else normed)
            linears.learn(normed)
            stream = normed.stream
        if self.layer.after_attention is not None:
            attended = _child(module, self.layer.after_attention)(attended)
        return self._with(returned, self._after_attention(module, values_of(attended), stream, operands[1]))

    def _with(self, returned: Any, computed: Tensor) -> Any:
        """What the layer returns."""
        return computed if self.layer.returned_too is None else (computed, returned)

    def _side_by_side(
        self,
        module: nn.Module,
        normed: Tensor,
        stream: Tensor,
        attend: Callable[[nn.Module, Tensor], tuple[Tensor, Any]],
        operands: Operands,
    ) -> Any:
        """A layer whose MLP reads x beside attention. operands: those of the second norm."""
        layer, y = self.layer, normed
        if layer.norms_first:
            y, stream = self._normed_and_stream(1, stream, operands)
        attended, returned = attend(_child(module, layer.attention), normed)
        if layer.mlp_norm != layer.norm and not layer.norms_first:
            y, stream = self._normed_and_stream(1, stream, operands)
        return self._with(returned, layer.sum(stream, attended, _child(module, layer.mlp)(y)))

    @property
    def _has_twins(self) -> bool:
        """Whether two norms read x and nothing else, so that one kernel computes both."""
        (first, second), layer = self.norms, self.layer
        both = isinstance(first, KernelLayerNorm) and isinstance(second, KernelLayerNorm)
        return both and layer.is_parallel and layer.mlp_norm != layer.norm and first.eps == second.eps

    def _normed_twice(self, x: Tensor, first: Operands, second: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of both norms, and x for the residual sum, as ``_normed_and_stream`` gives it."""
        from recompute.kernels.twin_layer_norm import twin_layer_norm

        arguments: Any = (*first, *second, self.norms[0].eps)

        def kernel(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return twin_layer_norm(x, *arguments)

        def as_written(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._as_written(0)(x), self._as_written(1)(x), x

        return self.compute(("twins", *self._kinds[:2]), (x,), (*first, *second), kernel, as_written, is_frame=False)

    def _normed_and_stream(self, part: int, x: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """A norm's output, and x for the residual sum, whose gradient the norm's backward adds to its own.

        part: 0 for the first norm, 1 for the second.
        """
        norm = self.norms[part]

        def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
            return norm.add(x, None, *operands)

        def as_written(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._as_written(part)(x), x

        return self.compute(("stream", self._kinds[part]), (x,), operands, kernel, as_written, is_frame=False)

    def _normed(self, norm: KernelRMSNorm, x: Tensor, operands: Operands, linears: LearnedLinears) -> LazyNorm:
        """The first norm's output, as a lazy tensor for attention."""
        from recompute.kernels.norm_linears import norm_linears

        (weight,), kind = operands, self._kinds[:1]

        def normalized() -> Tensor:
            def kernel(x: Tensor) -> Tensor:
                return norm.compute(x, weight)

            return self.compute(kind, (x,), [weight], kernel, self._as_written(0), is_frame=False)

        def together(x: Tensor, linears: list[LinearOperands]) -> tuple[tuple[Tensor, ...], Tensor]:
            weights, biases = zip(*linears, strict=True)

            def kernel(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
                return norm_linears(x, weight, weights, biases, norm.eps_for(x), norm.casting)

            def as_written(x: Tensor) -> list[Tensor]:
                y = self._as_written(0)(x)
                return [F.linear(y, *operands) for operands in linears]

            read = [weight, *weights, *biases]
            return self.compute((*kind, len(weights)), (x,), read, kernel, as_written, is_frame=False)

        return LazyNorm.of(x, weight, normalized, linears, together)

    def _after_attention(self, module: nn.Module, attended: Tensor, stream: Tensor, operands: Operands) -> Tensor:
        """The residual sum, the second norm and the MLP."""
        from recompute.kernels.residual_mlp import residual_mlp

        norm, inputs, mlp = self.norms[1], (attended, stream), _child(module, self.layer.mlp)

        def sum_and_norm(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
            h = x + stream
            return self._as_written(1)(h), h

        # The sum of two dtypes has the wider one, which the norm may treat in another way than that of x.
        fits = attended.dtype is stream.dtype or isinstance(norm, KernelLayerNorm) or norm.dtypes is None
        if (
            not self._adds_to_mlp
            or not fits
            or isinstance(norm, KernelLayerNorm)
            or self.mlp is None
            or is_hooked(mlp)
            or (mlp_operands := self.mlp.operands(mlp)) is None
        ):

            def sum_kernel(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
                return norm.add(x, stream, *operands)

            kernels = sum_kernel if fits else sum_and_norm
            y, h = self.compute(("sum", self._kinds[1], fits), inputs, operands, kernels, sum_and_norm)
            computed, after = mlp(y), self.layer.after_mlp
            return h + (computed if after is None else _child(module, after)(computed))
        (weight,), (weights, biases), activation = operands, mlp_operands, self.mlp.activation
        gate, up, down = weights

        def kernel(x: Tensor, stream: Tensor) -> Tensor:
            settings: dict[str, Any] = {**biases, "compress": self.compresses, "tile": self.tile}
            eps = norm.eps_for(x, stream)
            return residual_mlp(x, stream, weight, gate, up, down, eps, norm.casting, activation, **settings)

        def as_written(x: Tensor, stream: Tensor) -> Tensor:
            y, h = sum_and_norm(x, stream)
            return h + self._as_written(2)(y)

        kind = "sum", *self._kinds[1:], activation, self.compresses, self.tile
        read = [weight, *weights, *biases.values()]
        return self.compute(kind, inputs, read, kernel, as_written)

    def _as_written(self, part: int) -> Callable[[Tensor], Tensor]:
        """The forward that the class of the first norm (0), the second norm (1) or the MLP (2) has."""
        module = self.parts[part]()
        assert module is not None, "it has just been looked at"
        return MethodType(base_of(module).forward, module)

    def _operands(self, module: nn.Module, x: Tensor) -> tuple[Operands, Operands] | None:
        """What the norms' kernels read beside x; None where the layer has to run its own code."""
        if torch.compiler.is_compiling() or not self.layer.is_as_found(module):
            return None
        parts = self.layer.parts(module)
        if any(part() is not found for part, found in zip(self.parts, parts, strict=True)):
            return None
        found = []
        for part, norm in zip(parts, self.norms, strict=False):
            operands = norm.operands(part, x)
            if operands is None or is_hooked(part) or (isinstance(norm, KernelLayerNorm) and norm.casts(x)):
                return None
            if any(each is not None and each.dtype is not x.dtype for each in operands):
                return None
            found.append(operands)
        return found[0], found[1]


def _child(module: nn.Module, name: str) -> nn.Module:
    return module._modules[name]  # type: ignore[return-value]
