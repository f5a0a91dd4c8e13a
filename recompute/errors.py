"""Every error that this package raises on purpose, under one base class."""

from __future__ import annotations


class RecomputeError(Exception):
    """Base of all errors of this package: ``except RecomputeError`` catches them all."""


class PolicyError(RecomputeError):
    """A policy, or a file read by the same loader, is not valid. Names the file, the line and the key."""


class PolicyWarning(UserWarning):
    """A policy is valid, but does not do to this model what its author seems to expect."""


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


class RngError(RecomputeError, RuntimeError):
    """The state of a random number generator could not be captured."""


class AblationError(RecomputeError):
    """An ablation cannot be run as it is configured."""
