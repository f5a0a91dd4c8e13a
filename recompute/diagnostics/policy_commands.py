"""What `recompute explain` and `recompute verify` do: put a policy on a model that a command line names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from recompute.attach.apply import apply
from recompute.diagnostics.verify import verify
from recompute.estimation.build_model import build, build_fake, build_options
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.factories import call, describe
from recompute.policy.rules import Policy


def explain_policy(policy: Policy, model: str, *, wide: bool, width: int, **asked: Any) -> str:
    """A line on the model and the batch, then ``explain()`` after one forward on fake tensors.

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
        title += f"; {asked['adapters']}" if asked.get("adapters") else ""
        return f"{title}\n\n{handle.explain(wide=wide, width=width)}"


def verify_policy(policy: Policy, model: str, **asked: Any) -> Iterator[str]:
    """Yields a line on the model and the batch, and then the result of ``recompute.verify``. Raises as that does."""
    network, batch = build(model, **build_options(**asked))
    yield describe(network, batch)
    yield str(verify(network, batch, policy=policy))
