"""DDP under a policy: torchrun --nproc-per-node 2 examples/distributed/ddp.py"""

from __future__ import annotations

from pathlib import Path

from comparing import compare
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM


def wrap(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, device_mesh=mesh)


if __name__ == "__main__":
    compare(__doc__, wrap, str(Path(__file__).with_suffix(".yaml")))
