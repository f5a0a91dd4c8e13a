"""FSDP2 under a policy: torchrun --nproc-per-node 2 examples/distributed/fsdp2.py

With --compile, layers are compiled after the policy is on them and before they are sharded.
"""

from __future__ import annotations

from pathlib import Path

from comparing import compare
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM


def wrap(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    compare(__doc__, wrap, str(Path(__file__).with_suffix(".yaml")))
