"""`recompute plan` checks a request before anything heavy is imported, and then makes the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from recompute.errors import PlanError
from recompute.estimation.adapters import Adapters
from recompute.estimation.check_paths import check_source
from recompute.estimation.estimate_options import check_microbatches
from recompute.estimation.gpus import Gpu
from recompute.estimation.static_memory import OPTIMIZERS, check_sharding, read_option
from recompute.files import check_new, check_writable
from recompute.planning.make_plan import check_request, plan
from recompute.planning.plan import Plan, frontier_table
from recompute.profiling.cost_table import Profile
from recompute.units import parse_budget


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan for the model of a file, or for a saved profile. ``recompute.plan`` explains the fields."""

    budget: str
    model: str | None = None
    profile: Path | None = None
    save_profile: Path | None = None
    out: Path | None = None
    overwrite: bool = False
    """Whether files that are there are replaced."""
    seq_len: int = 4096
    batch_size: int = 1
    dtype: str = "bfloat16"
    device: str = "auto"
    gpu: Gpu | None = None
    sharding: str = "none"
    devices: int = 1
    microbatches: int = 1
    microbatches_in_flight: int = 1
    optimizer: str = "adamw"
    adapters: Adapters | None = None
    allowed: tuple[str, ...] | None = None
    frontier: bool = False
    verify: bool = False

    def checked(self) -> PlanRequest:
        """The same request, with other spellings of names replaced by the names themselves.

        Raises ``PlanError``, ``EstimateError`` or ``ModelError`` for mistakes that can be found without torch.
        """
        check_request(self.budget, self.allowed)
        check_microbatches(self.microbatches, self.microbatches_in_flight, PlanError)
        if (self.model is None) == (self.profile is None) and not (self.verify and self.model is not None):
            raise PlanError("expected --model or --profile, or both with --verify")
        if self.verify and self.model is None:
            raise PlanError("--verify runs the plan, which needs --model; found --profile alone")
        if self.gpu is not None and (self.verify or self.model is None):
            raise PlanError("--gpu calculates the profile of --model for a GPU, and excludes --profile and --verify")
        named = replace(
            self,
            optimizer=read_option(
                "optimizer", self.optimizer, [name for name, kind in OPTIMIZERS.items() if kind.torch_class]
            ),
            sharding=check_sharding(self.sharding, self.devices),
        )
        if named.sharding != "none" and self.gpu is None:
            raise PlanError(
                f"--sharding {named.sharding} is calculated for a GPU that --gpu names; found none. To plan on the "
                "devices themselves, use agree() of recompute.integrations.distributed"
            )
        if self.adapters is not None and self.model is None:
            raise PlanError("--lora adds adapters to --model; found --profile, which was measured with or without them")
        if self.adapters is not None and self.adapters.is_quantized and self.gpu is None:
            raise PlanError(
                f"--base {self.adapters.base} is calculated for a GPU that --gpu names; found none. To measure a "
                "quantized model, load it in Python and call recompute.plan"
            )
        if self.model is not None:
            check_source(self.model)
        for path in self._files:
            check_writable(path, error=PlanError)
        if not self.overwrite:
            check_new(self._files, error=PlanError, others="Pass --overwrite to replace, or name another file")
        return named

    @property
    def _files(self) -> list[Path]:
        """The files to write."""
        return [path for path in (self.out, self.save_profile) if path is not None]

    def run(self, progress: Callable[[str, int, int], None]) -> Plan:
        """Make the plan of a ``checked`` request; writes the profile, if asked to."""
        table = None if self.profile is None else Profile.load(self.profile)
        asked: dict[str, Any] = {"budget": self.budget, "allowed": self.allowed, "frontier": self.frontier}
        asked |= {"microbatches": self.microbatches, "microbatches_in_flight": self.microbatches_in_flight}
        if self.model is None:
            assert table is not None, "a checked request has a model or a profile"
            if self.save_profile is not None:
                table.save(self.save_profile)
            return plan(table, progress=progress, **asked)

        progress("loading torch and transformers", 0, 0)
        import torch

        from recompute.estimation.build_model import build, build_fake, build_options
        from recompute.profiling.profile_model import profile

        progress("building the model", 0, 0)
        kind = OPTIMIZERS[self.optimizer]
        optimizer = partial(getattr(torch.optim, kind.torch_class), **kind.options)
        training: dict[str, Any] = {"optimizer": optimizer, "progress": progress}
        sizes: dict[str, Any] = {"seq_len": self.seq_len, "batch_size": self.batch_size, "dtype": self.dtype}
        sizes["adapters"] = self.adapters
        if self.gpu is not None:
            with build_fake(self.model, **build_options(device="cpu", **sizes)) as (network, batch):
                shared: dict[str, Any] = {"device": self.gpu, "sharding": self.sharding, "devices": self.devices}
                table = profile(network, batch, **shared, **training)
        else:
            options = build_options(device=self.device, **sizes)
            if table is None and options["device"].type == "cpu":
                parse_budget(self.budget)  # a share of no device is told before anything is measured
            network, batch = build(self.model, **options)
            table = table or profile(network, batch, **training)
        if self.save_profile is not None:
            table.save(self.save_profile)
        return plan(network, batch, profile=table, verify=self.verify, **asked, **training)

    def text(self, plan: Plan, *, as_json: bool) -> str:
        """The plan as text, with its frontier if that was asked for; or as one JSON object."""
        if as_json:
            return plan.to_json()
        use = "" if self.out else '\nTo use it: --out plan.yaml, then recompute.apply(model, "plan.yaml").'
        return f"{plan}{use}\n\n{frontier_table(plan)}" if self.frontier else f"{plan}{use}"

    def write(self, plan: Plan) -> list[Path]:
        """Write the policy to ``out``. Returns all that the request has written."""
        if self.out is not None:
            plan.save(self.out)
        return self._files  # the profile was written before, as soon as it was measured
