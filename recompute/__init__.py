"""Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy."""

import importlib
from typing import TYPE_CHECKING, Any

from recompute import errors

if TYPE_CHECKING:
    from recompute.ablation.ablate import ablate
    from recompute.attach.apply import apply
    from recompute.attach.decorator import recompute
    from recompute.diagnostics.verify import verify
    from recompute.engine.scopes import keep
    from recompute.estimation.estimate import estimate
    from recompute.planning.make_plan import plan
    from recompute.policy.loading import load_policy
    from recompute.policy.rules import Policy, Rule
    from recompute.profiling.profile_model import profile

__version__ = "0.1.0"

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
    "Policy": "recompute.policy.rules",
    "Rule": "recompute.policy.rules",
    "ablate": "recompute.ablation.ablate",
    "apply": "recompute.attach.apply",
    "estimate": "recompute.estimation.estimate",
    "keep": "recompute.engine.scopes",
    "load_policy": "recompute.policy.loading",
    "plan": "recompute.planning.make_plan",
    "profile": "recompute.profiling.profile_model",
    "recompute": "recompute.attach.decorator",
    "verify": "recompute.diagnostics.verify",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: the command line judges its arguments before torch loads."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
