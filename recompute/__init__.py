"""Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy."""

import importlib
from typing import TYPE_CHECKING, Any

from recompute import errors

if TYPE_CHECKING:
    from recompute.attach import apply, recompute
    from recompute.comparison import ablate
    from recompute.engine.region import keep
    from recompute.planning.estimate import estimate
    from recompute.planning.plans import plan
    from recompute.planning.profiles import profile
    from recompute.policy.loading import load_policy
    from recompute.policy.model import Policy, Rule
    from recompute.verification import verify

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

_MODULES = {
    "Policy": "recompute.policy.model",
    "Rule": "recompute.policy.model",
    "ablate": "recompute.comparison",
    "apply": "recompute.attach",
    "estimate": "recompute.planning.estimate",
    "keep": "recompute.engine.region",
    "load_policy": "recompute.policy.loading",
    "plan": "recompute.planning.plans",
    "profile": "recompute.planning.profiles",
    "recompute": "recompute.attach",
    "verify": "recompute.verification",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: the command line judges its arguments before torch loads."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
