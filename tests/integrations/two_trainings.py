"""Run in each of two processes: a training without a policy and with one, in the way that the command line names."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_testing import Decoder, fitted
from ruamel.yaml import YAML
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from trainer_testing import ACCUMULATED, STEPS, arguments, logged, model, right_tokens, texts
from transformers import Trainer

from recompute.estimation.storage_tracker import StorageTrace
from recompute.integrations.lightning import RecomputeCallback
from recompute.integrations.transformers import RecomputeTrainingArguments

STACKS = Path(__file__).parents[2] / "examples" / "stacks"


class Counting(Trainer):
    """Bytes that each forward leaves, by storages: gloo's threads free some where no profiler looks."""

    def __init__(self, *given, counts=None):
        """counts: gets (right, all) tokens of each micro-batch, from whole logits."""
        super().__init__(*given, train_dataset=texts())
        self.held, self.counts = [], counts

    def compute_loss(self, net, inputs, *given, **options):
        if self.counts is not None:
            self.counts.append(right_tokens(self.model, inputs))
        with StorageTrace() as trace:
            loss = super().compute_loss(net, inputs, *given, **options)
            trace.mark("forward")
        self.held.append(trace.held_nbytes["forward"])
        return loss


def trained(folder, counts=None, **options):
    given = {"max_steps": 2 * STEPS, "ddp_backend": "gloo", **options}
    trainer = Counting(model(), arguments(folder, RecomputeTrainingArguments, **given), counts=counts)
    trainer.train()
    assert len(trainer.held) == 2 * STEPS * ACCUMULATED
    return trainer


def under_ddp(way, folder):
    """Losses as without, and one accuracy, of the tokens of both."""
    without_logits = {"recompute_policy": "auto", "recompute_kwargs": {"logits": False}}
    policies, counts = ({}, {"recompute_policy": "elementwise"}, without_logits), []
    plain, hooks, fused = (trained(folder, counts, learning_rate=0.05, **policy) for policy in policies)
    for trainer in (plain, hooks, fused):
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert logged(hooks, "loss") == logged(plain, "loss")
    assert max(hooks.held) < 0.8 * min(plain.held)
    assert logged(hooks, "token_accuracy") == []
    torch.testing.assert_close(logged(fused, "loss"), logged(plain, "loss"), rtol=1e-4, atol=0)
    counts = torch.tensor(counts[-len(fused.held) :]).view(2 * STEPS, ACCUMULATED, 2).sum(1)
    own = (counts[:, 0] / counts[:, 1]).tolist()
    distributed.all_reduce(counts)
    expected = (counts[:, 0] / counts[:, 1]).tolist()
    assert own != expected, "both have the same tokens: this shows nothing"
    torch.testing.assert_close(logged(fused, "token_accuracy"), expected, rtol=1e-6, atol=0)


def options_of(way):
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


def sharded(way, folder):
    """Losses and norms of gradients as without, and less held."""
    let_accelerate_shard_on_the_cpu()
    policies = (None, "full" if way == "zero3" else "elementwise")  # what reads one of ZeRO-3's weights is kept
    plain, policed = (trained(folder, recompute_policy=policy, **options_of(way)) for policy in policies)
    for trainer in (plain, policed):
        is_sharded = isinstance(trainer.model, FSDPModule) if way == "fsdp2" else trainer.is_deepspeed_enabled
        assert is_sharded, "this is not what it is to show"
    assert logged(policed, "loss") == logged(plain, "loss")
    assert logged(policed, "grad_norm") == logged(plain, "grad_norm")
    assert min(logged(policed, "recompute_dropped_nbytes")) > 0
    assert min(policed.held[1:]) < 0.9 * min(plain.held[1:])  # ZeRO-3 learns from the first


class Sharded(Decoder):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def by_lightning(way, folder):
    def strategy():
        if way == "lightning, ddp":
            return DDPStrategy(process_group_backend="gloo")
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    is_sharded, found = way == "lightning, fsdp2", []
    for callbacks in ([], [RecomputeCallback(module="model" if is_sharded else None)]):
        module = Sharded() if is_sharded else Decoder()
        found.append(fitted(folder, *callbacks, of=module, strategy=strategy(), devices=2))
        assert len(module.losses) == STEPS * ACCUMULATED
        assert not callbacks or not {"forward", "training_step"} & vars(module).keys()
    plain, policed = found
    assert any(isinstance(each, DTensor) for each in plain.parameters()) is is_sharded
    assert policed.losses == plain.losses
    assert min(policed.held) < 0.85 * min(plain.held)  # gloo's threads may let go of something late
    assert all(torch.equal(*map(local, pair)) for pair in zip(policed.parameters(), plain.parameters(), strict=True))
    of_ranks = [None, None]
    distributed.all_gather_object(of_ranks, plain.losses)
    assert of_ranks[0] != of_ranks[1], "both train on the same texts: this shows nothing"


WAYS = {"ddp": under_ddp, **dict.fromkeys(("fsdp2", "zero2", "zero3"), sharded)}
WAYS |= dict.fromkeys(("lightning, ddp", "lightning, fsdp2"), by_lightning)

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    WAYS[sys.argv[1]](sys.argv[1], Path(sys.argv[2]))
    distributed.destroy_process_group()
    print("two trainings agree", flush=True)
    os._exit(0)  # threads of torch 2.15 may abort a process that takes its time to end
