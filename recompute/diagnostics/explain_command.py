"""What `recompute explain` does: puts a policy on a model of fake tensors, and says what it keeps and drops."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from recompute.attach.apply import apply
from recompute.estimation.build_model import build_fake, build_options
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.factories import call, describe
from recompute.policy.rules import Policy


def explain_policy(policy: Policy, model: str, *, wide: bool, width: int, **asked: Any) -> str:
    """A line on the model and the batch, then ``explain()`` after one forward.

    Where it is asked for CUDA and there is none, fake tensors of the CPU run as CUDA's would.

    model: as ``build`` takes it. wide, width: as ``explain()`` takes them. asked: as ``build_options`` takes it.
    """
    is_absent = asked["device"] == "cuda" and not torch.cuda.is_available()
    options = build_options(**asked | ({"device": "cpu"} if is_absent else {}))
    with build_fake(model, **options) as (network, batch):
        handle = apply(network, policy)
        with as_on_cuda() if is_absent else nullcontext():
            call(network, batch)
        title = describe(network, batch, "as on cuda, which is not here" if is_absent else "")
        return f"{title}\n\n{handle.explain(wide=wide, width=width)}"
