"""What `recompute verify` does: a model with random weights, run with a policy and without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recompute.diagnostics.verify import verify
from recompute.estimation.build_model import build, build_options
from recompute.estimation.factories import describe
from recompute.policy.rules import Policy


def verify_policy(policy: Policy, model: str, **asked: Any) -> Iterator[str]:
    """Yields a line on the model and the batch, and then what ``recompute.verify`` found. Raises what that raises.

    model: as ``build`` takes it. asked: as ``build_options`` takes it.
    """
    network, batch = build(model, **build_options(**asked))
    yield describe(network, batch)
    yield str(verify(network, batch, policy=policy))
