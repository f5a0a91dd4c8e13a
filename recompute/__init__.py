"""Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy."""

from typing import TYPE_CHECKING, Any

from recompute import errors
from recompute.attach import apply, recompute
from recompute.engine.region import keep
from recompute.planning.estimate import estimate
from recompute.planning.plans import plan
from recompute.planning.profiles import profile
from recompute.policy.loading import load_policy
from recompute.policy.model import Policy, Rule
from recompute.verification import verify

if TYPE_CHECKING:
    from recompute.comparison import ablate

__all__ = [
    "Policy",
    "Rule",
    "ablate",
    "apply",
    "errors",
    "estimate",
    "keep",
    "load_policy",
    "plan",
    "profile",
    "recompute",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "ablate":  # which loads what others do not need
        from recompute.comparison import ablate

        return ablate
    raise AttributeError(f"module 'recompute' has no attribute {name!r}")
