"""Every error that this package raises on purpose, under one base class."""

from __future__ import annotations

import sys
import warnings

from recompute.source_files import OURS, lies_in


class RecomputeError(Exception):
    """Base of all errors of this package: ``except RecomputeError`` catches them all."""


class PolicyError(RecomputeError):
    """A policy, or a file read by the same loader, is not valid. Names the file, the line and the key."""


class NoEffectError(PolicyError):
    """A policy is valid, but does nothing to this model: its rules govern no module of it, or drop nothing."""


class PolicyWarning(UserWarning):
    """A policy is valid, but does not do to this model what its author seems to expect."""


def warn(message: str) -> None:
    """Warn with ``PolicyWarning`` where the user's code calls this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and lies_in(frame.f_code.co_filename, *OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PolicyWarning, stacklevel=level)


class AlreadyAppliedError(RecomputeError):
    """A module is already under a policy."""


class UnsupportedError(RecomputeError):
    """A rule asks for something that cannot be done to the module it matches."""


class KernelError(RecomputeError, ValueError):
    """An op of ``recompute.kernels`` got arguments that it does not take."""


class RegenerationError(RecomputeError, RuntimeError):
    """What was regenerated is not what was dropped: the region did not run the same way twice."""


class MutationError(RecomputeError, RuntimeError):
    """A tensor that backward needs was modified in place after it was saved."""


class GradientMismatch(RecomputeError):
    """A model does not compute under a policy what it computes without it."""


class RngError(RecomputeError, RuntimeError):
    """The state of a random number generator could not be captured."""


class HostMemoryError(RecomputeError, MemoryError):
    """More is to be offloaded than a rule allows, or than there is room for."""


class WriteError(RecomputeError, OSError):
    """A file cannot be written: the disk is full, say. What was there before is there still."""


class ModelError(RecomputeError, ValueError):
    """There is no such model as is described, or it cannot be run without data of its own, or not be trained."""


class EstimateError(RecomputeError, ValueError):
    """An estimate is asked for with an unknown optimizer, sharding or dtype."""


class AblationError(RecomputeError):
    """An ablation cannot be run as it is configured."""


class PlanError(RecomputeError):
    """A plan cannot be made from what is given."""


class BudgetError(PlanError):
    """A budget cannot be read, or no plan meets it. Then the message names the least budget that one could meet."""
