"""What `recompute explain` does: puts a policy on a model of fake tensors, and says what it keeps and drops."""

from __future__ import annotations

from typing import Any

from recompute.attach.apply import apply
from recompute.estimation.build_model import build_fake, build_options
from recompute.estimation.factories import call, describe
from recompute.policy.rules import Policy


def explain_policy(policy: Policy, model: str, **asked: Any) -> str:
    """A line on the model and the batch, then ``explain()`` after one forward.

    model: as ``build`` takes it. asked: as ``build_options`` takes it.
    """
    with build_fake(model, **build_options(**asked)) as (network, batch):
        handle = apply(network, policy)
        call(network, batch)
        return f"{describe(network, batch)}\n\n{handle.explain()}"
