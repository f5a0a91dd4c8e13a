"""A captured region as code: its forward and its backward, and all that the one leaves for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recompute.compiled.autocast_settings import CallSettings
from recompute.compiled.codegen import GeneratedCode
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.numerics import Autocast

ANY = -1
"""The offset of a gradient that may begin anywhere in its storage: the code counts from its beginning."""


@dataclass(frozen=True, eq=False)
class DroppedOutputs:
    """Brings back the outputs of a region that others have saved and dropped.

    The backward of those others comes before the region's own. Both need some of the same values. Small ones are left
    for the region's own backward: the statistics of a norm's rows, say. Large ones would wait through backwards of
    others, where memory is at its peak. So they are made again.
    """

    run: GeneratedCode
    """``(held, kept, states) -> (outputs, left)``."""
    values: tuple[tuple[int, int], ...]
    """The positions of the outputs that it brings back, and their values in the plan."""
    held: tuple[int, ...]
    """The indices of the held inputs that it takes."""
    kept: tuple[int, ...]
    """The indices of the kept values that it takes."""
    backward: GeneratedCode
    """``(held, kept, states, gradients, left) -> contributions``: the region's backward after it."""


@dataclass(frozen=True, eq=False)
class Program:
    """Runs in the place of a region."""

    plan: SavePlan
    forward: GeneratedCode
    """``(name, objects, is_sure, *given, *casts) -> (outputs, kept, states, saved, held, others)``.

    The last three are inputs: those that autograd is to save, those that are held, and those that are only looked at.
    is_sure: whether backward will not need another run of forward.
    """
    backward: GeneratedCode
    """``(held, kept, states, gradients) -> contributions``."""
    outputs: DroppedOutputs | None
    """Brings back the outputs that others have saved and dropped; None if there can be none."""
    edges: tuple[int, ...]
    """The positions of the inputs that get contributions to their gradients, in the order of these."""
    held: tuple[tuple[int, str], ...]
    """The positions of the inputs that backward reads, and how each is held.

    A parameter is held "itself", or the "memory" that it has now. Of another input a "copy" is held, or autograd has
    "saved" it.
    """
    plain: tuple[int, ...]
    """The positions of the inputs that are no parameters."""
    others: tuple[tuple[int, str], ...]
    """The positions of all parameters, and of other inputs that backward does not read, in case forward runs again.

    "itself": a parameter. "memory": its memory is held, as several outputs take gradients, and backward may come with
    those of others than before. "weak": it is held weakly, and if it is gone, backward is refused. "updated":
    forward writes to it, and it may have any value.
    """
    updated: tuple[int, ...]
    """The positions of the inputs that forward writes to, and of those that share memory with these.

    Nothing that it returns depends on them.
    """
    shared: tuple[tuple[int, int], ...]
    """Pairs of the positions of inputs that must share memory."""
    shared_gradients: tuple[tuple[int, int], ...]
    """Pairs of outputs whose gradients must."""
    offsets: tuple[tuple[int, int], ...]
    """The positions of inputs, and the offset in its storage that each must have, as the region counts from there."""
    shown: tuple[int, ...]
    """The indices of the kept values that share memory with an output, so that others may write to them."""
    compressible: tuple[int, ...]
    """The indices of the kept values that a rule may hold as codes of 8 bits."""
    around: CallSettings
    """Those that forward ran under. The casts of autocast are ops of the program, which runs without it."""
    backward_autocast: Autocast | None
    """The autocast that backward ran under."""
    casts: tuple[int, ...]
    """The positions of the parameters that are given as autocast has cast them, too. Their casts are further inputs."""
    gradients: tuple[Layout | None, ...]
    """The layout of each output's gradient, whose offset may be ``ANY``; None if it has none."""
    reaches: tuple[frozenset[int], ...]
    """For each output, the positions of the inputs that its gradient reaches."""
    fixed: tuple[int, ...]
    """Which outputs take no gradient."""
    draws_from: tuple[Any, ...] | None
    """The generators that forward may draw from beside torch's own; None if it draws no random numbers."""

    @property
    def kernels(self) -> tuple[GeneratedKernel, ...]:
        return *self.forward.kernels, *self.backward.kernels

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether the inputs lie in memory as the code expects."""
        return (
            all([given[position].storage_offset() == offset for position, offset in self.offsets])
            and all([share_memory(given[one], given[other]) for one, other in self.shared])
            and (not self.updated or self._are_apart(given))
        )

    def _are_apart(self, given: Sequence[Tensor]) -> bool:
        """Whether what forward writes to shares no memory with other inputs, which it may read, beyond ``shared``."""
        storages = [tensor.untyped_storage()._cdata for tensor in given]
        roots = set(self.updated).difference([one for one, _ in self.shared])
        written = {storages[position] for position in roots}
        others = [storage for position, storage in enumerate(storages) if position not in self.updated]
        return len(written) == len(roots) and written.isdisjoint(others)


def share_memory(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.untyped_storage()._cdata == other.untyped_storage()._cdata
