"""Run in each of two processes: a LightningModule under DDP or FSDP2, with a policy and without."""

import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_testing import Decoder, fitted
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_testing import ACCUMULATED, STEPS

from recompute.integrations.lightning import RecomputeCallback


class Sharded(Decoder):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def ways():
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"ddp": DDPStrategy(process_group_backend="gloo"), "fsdp2": sharded}


def main():
    torch.set_num_threads(1)
    for way in ways():
        found = []
        for callbacks in ([], [RecomputeCallback(module=None if way == "ddp" else "model")]):
            module = Sharded() if way == "fsdp2" else Decoder()
            found.append(fitted(Path(sys.argv[1]), *callbacks, of=module, strategy=ways()[way], devices=2))
            assert len(module.losses) == STEPS * ACCUMULATED
            assert not callbacks or not {"forward", "training_step"} & vars(module).keys()
        assert any(isinstance(each, DTensor) for each in found[0].parameters()) is (way == "fsdp2")
        plain, policed = found
        assert policed.losses == plain.losses
        assert min(policed.held) < 0.85 * min(plain.held)  # gloo's threads may let go of something late
        for one, other in zip(policed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(one), local(other))
        of_ranks = [None, None]
        distributed.all_gather_object(of_ranks, plain.losses)
        assert of_ranks[0] != of_ranks[1], "both train on the same texts: this shows nothing"
    distributed.destroy_process_group()
    print("two modules agree")


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
