"""A pipeline whose stages have plans of their own: torchrun --nproc-per-node 2 examples/distributed/pipeline.py

A Llama is split into as many stages as there are processes. Under 1F1B the first stage has the most microbatches
between forward and backward at once, so within one budget it keeps the least of each. The same steps without a policy
must give the same losses, gradients and weights, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import LARGE, LARGE_HEADS, SMALL, SMALL_HEADS, sum_of_bits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.counters import describe_machine, memory_trace
from recompute.diagnostics.comparing_runs import deterministic
from recompute.integrations.distributed import microbatches_in_flight
from recompute.planning import solver
from recompute.planning.plan import Plan
from recompute.planning.prediction import choices_of
from recompute.units import humanize, parse_budget

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
EXACT = ["keep", "hook", "checkpoint"]
"""What a plan may choose, so that gradients are the same bits."""


class LlamaStage(nn.Module):
    """Some layers of a Llama; the first stage also has the embedding, the last one the norm and the head."""

    def __init__(self, model: LlamaForCausalLM, index: int, count: int):
        super().__init__()
        layers = list(model.model.layers)
        first, last = (len(layers) * each // count for each in (index, index + 1))
        self.layers = nn.ModuleList(layers[first:last])
        self.rotary_emb = model.model.rotary_emb
        self.embed_tokens = model.model.embed_tokens if index == 0 else nn.Identity()
        is_last = index == count - 1
        self.norm, self.lm_head = (model.model.norm, model.lm_head) if is_last else (nn.Identity(), nn.Identity())

    def forward(self, ids_or_hidden: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids_or_hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotations = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotations)
        return self.lm_head(self.norm(hidden))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Pipeline:
    """This rank's stage, in training."""

    def __init__(self, options: argparse.Namespace, device: torch.device, policy: Any = None):
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.options, self.device = options, device
        torch.manual_seed(0)
        layers = {} if options.large else {"num_hidden_layers": 2 * self.count}
        shape = (LARGE | LARGE_HEADS if options.large else SMALL | SMALL_HEADS) | layers
        with device:
            model = LlamaForCausalLM(LlamaConfig(use_cache=False, **shape))
            model = model.to(torch.bfloat16 if options.large else torch.float32)
        self.stage = LlamaStage(model, self.rank, self.count).train()
        self.hidden_size = shape["hidden_size"]
        self.policy = policy
        if policy is not None:
            recompute.apply(self.stage, policy)
        self.make()

    def make(self) -> None:
        """The schedule and the optimizer, as new."""
        stage = PipelineStage(self.stage, self.rank, self.count, self.device)
        self.schedule = SCHEDULES[self.options.schedule](stage, self.options.microbatches, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-4)

    @property
    def in_flight(self) -> int:
        return microbatches_in_flight(self.schedule)[self.rank]

    def backward(self) -> list[float]:
        """Forward and backward of all microbatches; the losses, in the last stage."""
        size = self.options.microbatches * self.options.batch
        ids = torch.randint(0, 256, (size, self.options.sequence), device=self.device)
        losses: list[Tensor] = []
        given = (ids,) if self.rank == 0 else ()
        last = {"target": ids, "losses": losses} if self.rank == self.count - 1 else {}
        self.schedule.step(*given, **last, return_outputs=False)  # which hold all logits of a step
        return [loss.item() for loss in losses]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plan_inputs(self) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """One microbatch of this stage, and its loss; None: the gradient of its output comes from the next stage."""
        ids = torch.randint(0, 256, (self.options.batch, self.options.sequence), device=self.device)
        loss = partial(_loss_of_targets, ids) if self.rank == self.count - 1 else None
        if self.rank == 0:
            return ids, loss
        dtype = next(self.stage.parameters()).dtype
        hidden = torch.randn(*ids.shape, self.hidden_size, device=self.device, dtype=dtype)
        return hidden.requires_grad_(), loss

    def results(self) -> dict[str, Any]:
        """Losses, gradients and weights, by deterministic algorithms; and the peak."""
        torch.manual_seed(1)  # all stages draw the same tokens
        losses, gradients = [], []
        with deterministic(self.device.type == "cuda"):
            for _ in range(self.options.steps):
                losses.append(self.backward())
                gradients.append([sum_of_bits(parameter.grad) for parameter in self.stage.parameters()])
                self.update()
        weights = [sum_of_bits(parameter) for parameter in self.stage.parameters()]
        return {"losses": losses, "gradients": gradients, "weights": weights, "peak_bytes": self.peak_nbytes()}

    def peak_nbytes(self) -> int:
        """The most bytes alive in a step, of three runs the least, as gloo's threads let go of tensors late."""
        found = []
        for _ in range(3):
            del self.schedule, self.optimizer  # their buffers and states are made, and so counted, in the first step
            gc.collect()
            on_cuda = self.device.type == "cuda"
            parameters = sum(each.nbytes for each in (*self.stage.parameters(), *self.stage.buffers()))
            before = torch.cuda.memory_allocated() if on_cuda else parameters
            with memory_trace(self.device) as trace:  # a mode that counts would have captured code run op by op
                self.make()
                for _ in range(2):
                    self.backward()
                    self.update()
            found.append(before + trace.peak_nbytes)
        return min(found)


def _loss_of_targets(ids: Tensor, logits: Tensor) -> Tensor:
    return loss_of(logits, ids)


def planned(pipeline: Pipeline) -> Plan:
    """The plan of this rank's stage, for a budget that all stages share."""
    options = pipeline.options
    microbatch, loss = pipeline.plan_inputs()
    profile = recompute.profile(pipeline.stage, microbatch, loss=loss, optimizer=torch.optim.AdamW, kernels=False)
    several = {"microbatches": options.microbatches, "microbatches_in_flight": pipeline.in_flight, "allowed": EXACT}
    if options.budget is None:  # half way between what the neediest stage must have and what it could use
        most = recompute.plan(profile, budget=1 << 60, **several)
        bounds: list[Any] = [None] * pipeline.count
        dist.all_gather_object(bounds, (solver.floor(most.profile).prediction.peak_nbytes, most.predicted_peak_bytes))
        budget = sum(map(max, zip(*bounds, strict=True))) // 2
    else:
        budget = parse_budget(options.budget, profile.capacity_nbytes)
    return recompute.plan(
        pipeline.stage,
        microbatch,
        budget=budget,
        profile=profile,
        loss=loss,
        optimizer=torch.optim.AdamW,
        **several,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="of each device: 40GiB, 80%%; by default one that makes stages choose")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="the shape of Llama 1B, bf16")
    parser.add_argument("--sequence", type=int, help="tokens; by default 4096 with --large, else 128, of two each")
    parser.add_argument("--out", type=Path, help="where to write a JSON record")
    options = parser.parse_args()
    options.batch = 1 if options.large else 2
    options.sequence = options.sequence or (4096 if options.large else 128)

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    plain = Pipeline(options, device)
    plan, in_flight = planned(plain), plain.in_flight
    without = plain.results()
    del plain
    gc.collect()
    under = Pipeline(options, device, plan.policy).results()
    found = {
        "in_flight": in_flight,
        "budget_bytes": plan.budget_nbytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "choices": [choice.name for choice in choices_of(plan.profile, plan.assignment)],
        "without": without,
        "with": under,
        "wrong": _wrong(plan, without, under),
    }
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, (found, str(plan)))
    if dist.get_rank() == 0:
        show(options, device, stages)
    dist.destroy_process_group()
    sys.exit(1 if any(stage["wrong"] for stage, _ in stages) else 0)


def _wrong(plan: Plan, without: dict[str, Any], under: dict[str, Any]) -> list[str]:
    differ = [f"{what} differ" for what in ("losses", "gradients", "weights") if without[what] != under[what]]
    return differ + (["the peak is over the budget"] if under["peak_bytes"] > 1.02 * plan.budget_nbytes else [])


def show(options: argparse.Namespace, device: torch.device, stages: list[tuple[dict[str, Any], str]]) -> None:
    """Print what each stage chose, predicted and measured; and write the record."""
    for index, (stage, text) in enumerate(stages):
        print(f"stage {index}: {stage['in_flight']} of {options.microbatches} microbatches in flight")
        print("\n".join(f"    {line}" for line in text.splitlines()))
        peaks = stage["predicted_bytes"], stage["with"]["peak_bytes"], stage["without"]["peak_bytes"]
        print("peak: {} predicted, {} measured, {} without the policy".format(*map(humanize, peaks)))
        print()
    losses = stages[-1][0]
    for name in ("without", "with"):
        print(f"losses {name:8}", " ".join(f"{sum(each) / len(each):.6f}" for each in losses[name]["losses"]))
    wrong = sorted({f"stage {index}: {what}" for index, (stage, _) in enumerate(stages) for what in stage["wrong"]})
    print("wrong: " + "; ".join(wrong) if wrong else "losses, gradients and weights are equal on all stages")
    if options.out is not None:
        shape = "Llama 1B, bf16" if options.large else "tiny"
        record = {
            "command": " ".join(["torchrun", f"--nproc-per-node {len(stages)}", *sys.argv]),
            "machine": describe_machine(device),
            "shape": f"{shape}, {options.microbatches} microbatches of {options.batch} x {options.sequence} tokens",
            "schedule": options.schedule,
            "stages": [{**stage, **{name: _short(stage[name]) for name in ("without", "with")}} for stage, _ in stages],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _short(results: dict[str, Any]) -> dict[str, Any]:
    return {"losses": results["losses"], "peak_bytes": results["peak_bytes"]}


if __name__ == "__main__":
    main()
