"""What a loss is given: its settings, and the classes of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.scores import Scores, check_scores

REDUCTIONS = ("mean", "sum", "none")


class LossSettings(NamedTuple):
    """How a loss is computed."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    """0 for none."""
    reduction: str
    with_max: bool
    """Whether the highest logit of each token is returned, too."""
    with_argmax: bool
    """Whether its index is."""
    scale: float = 1.0
    temperature: float = 1.0
    with_entropy: bool = False
    """Whether the entropy of each token is returned, too."""
    group: str = ""
    """The name of the process group whose ranks share the words; empty where this rank has all of them."""
    first: int = 0
    """The first of the words that this rank has."""
    vocabulary: int = 0
    """The words of all ranks; 0 where this rank has all."""

    @property
    def scores(self) -> Scores:
        return Scores.of(self.scale, self.softcap, self.temperature)


LOSS_SCHEMA = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, bool with_max,"
    " bool with_argmax, float scale, float temperature, bool with_entropy, str group, SymInt first, SymInt vocabulary"
)
"""``LossSettings`` as a registered op takes them: one argument a field."""


def checked_settings(
    op: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    with_max: bool,
    with_argmax: bool,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> LossSettings:
    """The settings of the op called ``op``.

    Raises:
        KernelError: for one that makes no sense.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise KernelError(f"{op}: label_smoothing is {label_smoothing}; expected a number from 0 to 1.")
    if not z_loss >= 0.0:
        raise KernelError(f"{op}: z_loss is {z_loss}; expected a number of at least 0.")
    check_scores(op, scale=scale, temperature=temperature, softcap=softcap)
    launch.check_one_of(op, "reduction", reduction, REDUCTIONS)
    numbers = int(ignore_index), float(label_smoothing), float(z_loss), float(softcap or 0.0)
    return LossSettings(*numbers, reduction, with_max, with_argmax, float(scale), float(temperature))


def check_target(
    op: str, target: Tensor, class_weights: Tensor | None, shape: tuple[int, ...], vocabulary: int, device: torch.device
) -> None:
    """Refuse a target that is not int64 of ``shape`` on ``device``, and weights that are not one for each class."""
    if not isinstance(target, Tensor):
        raise KernelError(f"{op}: target is {type(target).__name__}; expected a Tensor.")
    if target.dtype is not torch.int64 or target.shape != shape or target.device != device:
        raise KernelError(
            f"{op}: target is {target.dtype} of shape {tuple(target.shape)} on {target.device}; "
            f"expected torch.int64 of shape {tuple(shape)} on {device}."
        )
    if class_weights is not None and class_weights.shape != (vocabulary,):
        raise KernelError(f"{op}: class_weights has shape {tuple(class_weights.shape)}; expected ({vocabulary},).")
    if class_weights is not None and class_weights.requires_grad:
        raise KernelError(f"{op}: class_weights requires a gradient, but gets none; expected class_weights.detach().")


class Targets(NamedTuple):
    """The rows' classes, and the settings of their loss."""

    labels: Tensor
    """(M · K,), contiguous."""
    per_row: int
    """K: 1 for a loss, and 0 where no word is asked for."""
    class_weights: Tensor | None
    """(V,), contiguous, of the dtype that sums have."""
    vocabulary: int
    """The words of all ranks."""
    settings: LossSettings

    @classmethod
    def of(cls, target: Tensor, class_weights: Tensor | None, logits: Tensor, vocabulary: int, flat: Any) -> Targets:
        """The targets as the kernels read them.

        target: (...), or (..., K). ``logits``: (..., any), of their dtype; ``flat``: the fields of the settings.
        """
        if class_weights is not None:
            class_weights = launch.dense(class_weights.to(wide_dtype(logits)))
        per_row = target.shape[-1] if target.dim() == logits.dim() else 1
        settings = LossSettings(*flat)
        vocabulary = settings.vocabulary or vocabulary
        return cls(launch.dense(target.reshape(-1)), per_row, class_weights, vocabulary, settings)

    def are_in_bounds(self) -> Tensor:
        """Which of them are classes, or ignored."""
        in_range = (self.labels >= 0) & (self.labels < self.vocabulary)
        return in_range | (self.labels == self.settings.ignore_index)

    def weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets count, and their classes' weights: nan where there is no such class."""
        labels, weights = self.labels, self.class_weights
        in_range = (labels >= 0) & (labels < self.vocabulary)
        found = torch.ones_like(like) if weights is None else weights[labels.where(in_range, 0)]
        return labels != self.settings.ignore_index, torch.where(in_range, found, torch.nan)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of ``launch.widen(tensor)``."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
