"""Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy."""

from recompute import errors
from recompute.attach import apply, recompute
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
