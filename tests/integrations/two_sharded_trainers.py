"""Run in each of two processes: a Trainer under FSDP2 or DeepSpeed's ZeRO, with a policy and without."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from ruamel.yaml import YAML
from torch.distributed.fsdp import FSDPModule
from trainer_testing import ACCUMULATED, STEPS, arguments, logged, model, texts
from transformers import Trainer

from recompute.estimation.storage_tracker import StorageTrace
from recompute.integrations.transformers import RecomputeTrainingArguments

STACKS = Path(__file__).parents[2] / "examples" / "stacks"


class Counting(Trainer):
    """Bytes that each forward leaves, by storages: gloo's threads free some where no profiler looks."""

    def __init__(self, *given):
        super().__init__(*given, train_dataset=texts())
        self.held = []

    def compute_loss(self, *given, **options):
        with StorageTrace() as trace:
            loss = super().compute_loss(*given, **options)
            trace.mark("forward")
        self.held.append(trace.held_nbytes["forward"])
        return loss


def options(way):
    if way == "fsdp2":
        config = YAML(typ="safe").load((STACKS / "accelerate-fsdp2.yaml").read_text(encoding="utf-8"))["fsdp_config"]
        return {"fsdp": True, "fsdp_config": {key.removeprefix("fsdp_"): value for key, value in config.items()}}
    # No prefetch: of so small a model it is all weights, gathered at the end of forward for what runs again.
    zero = {"stage": int(way[-1]), "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    config = json.loads((STACKS / "deepspeed-zero3.json").read_text(encoding="utf-8"))
    config["zero_optimization"] |= zero
    return {"deepspeed": config | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}}


def let_accelerate_shard_on_the_cpu():
    """It takes FSDP on accelerators alone, and on the CPU does without, though nothing that it then runs minds."""
    original = AcceleratorState.__init__

    def init(self, *given, fsdp_plugin=None, **others):
        original(self, *given, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def main():
    torch.set_num_threads(1)
    way, folder = sys.argv[1], Path(sys.argv[2])
    let_accelerate_shard_on_the_cpu()
    found = []
    for policy in (None, "full" if way == "zero3" else "elementwise"):  # what reads one of ZeRO-3's weights is kept
        given = {"max_steps": 2 * STEPS, "ddp_backend": "gloo", "recompute_policy": policy, **options(way)}
        trainer = Counting(model(), arguments(folder, RecomputeTrainingArguments, **given))
        trainer.train()
        assert len(trainer.held) == 2 * STEPS * ACCUMULATED
        sharded = isinstance(trainer.model, FSDPModule) if way == "fsdp2" else trainer.is_deepspeed_enabled
        assert sharded, "this is not what it is to show"
        found.append(trainer)
    plain, policed = found
    assert logged(policed, "loss") == logged(plain, "loss")
    assert logged(policed, "grad_norm") == logged(plain, "grad_norm")
    assert min(logged(policed, "recompute_dropped_nbytes")) > 0
    assert min(policed.held[1:]) < 0.9 * min(plain.held[1:])  # ZeRO-3 learns from the first
    torch.distributed.destroy_process_group()
    print("two trainers agree", flush=True)
    os._exit(0)  # threads of torch 2.15 may abort a process that takes its time to end


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
