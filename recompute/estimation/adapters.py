"""Which adapters train, and in which form the frozen base is held: checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from recompute.errors import EstimateError
from recompute.estimation.static_memory import read_option

ALL_LINEAR = "all-linear"
BASES = {
    "": "as the dtype says",
    "bfloat16": "bfloat16",
    "int8": "int8 by bitsandbytes, with a float32 scale a row",
    "nf4": "nf4 by bitsandbytes, with a float32 scale for 64 weights (no double quantization)",
    "nf4-double": "nf4 by bitsandbytes, with an 8-bit scale for 64 weights (double quantization)",
    "float8": "float8 by torchao, with a float32 scale a row",
}
"""The forms of a frozen base, and what each is."""


class Adapters(NamedTuple):
    """What ``recompute.estimate`` is told of adapters: its ``lora``, ``lora_targets`` and ``base``."""

    lora: Any = None
    """A rank, a configuration of PEFT's, or the fields of a ``LoraConfig``."""
    targets: str | Sequence[str] = ALL_LINEAR
    base: str = ""

    def read(self) -> Adapters | None:
        """The same, with other spellings replaced by the names themselves; None where nothing is adapted.

        Raises ``EstimateError`` for what is no rank, no configuration and no base, and for a base without adapters.
        """
        base = read_option("base", self.base, filter(None, BASES)) if self.base else ""
        if self.lora is None:
            if base or self.targets != ALL_LINEAR:
                told = f"base {base!r}" if base else f"lora_targets {self.targets!r}"
                raise EstimateError(f"{told} has an effect only with adapters. Pass lora as well")
            return None
        is_rank = isinstance(self.lora, int) and not isinstance(self.lora, bool) and self.lora >= 1
        if not is_rank and not hasattr(self.lora, "peft_type"):
            raise EstimateError(f"lora: expected a rank, as 16, or a configuration of PEFT's; found {self.lora!r}")
        targets = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        named = [name for each in targets if (name := each.strip())]
        return Adapters(self.lora, ALL_LINEAR if named == [ALL_LINEAR] else tuple(named), base)

    @property
    def is_quantized(self) -> bool:
        """Whether the base's Linear layers hold something else than numbers to multiply with."""
        return self.base not in ("", "bfloat16")

    def __str__(self) -> str:
        if not isinstance(self.lora, int):
            what = f"{type(self.lora).__name__.removesuffix('Config')} adapters"
        else:
            targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
            what = f"LoRA of rank {self.lora} on {targets}"
        return f"{what}, base {self.base}" if self.base else what
