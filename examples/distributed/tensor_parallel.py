"""Tensor and sequence parallel under a policy: torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py"""

from __future__ import annotations

from pathlib import Path

from comparing import compare
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaForCausalLM

PART, WHOLE = Shard(1), Replicate()  # of the sequence


def wrap(model: LlamaForCausalLM, mesh: DeviceMesh) -> nn.Module:
    layer_plan = {
        "input_layernorm": SequenceParallel(use_local_output=False),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": PART}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=PART, use_local_output=False),
        "post_attention_layernorm": SequenceParallel(use_local_output=False),
        "mlp": PrepareModuleInput(input_layouts=PART, desired_input_layouts=WHOLE),
        "mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "mlp.up_proj": ColwiseParallel(use_local_output=False),
        "mlp.down_proj": RowwiseParallel(output_layouts=PART, use_local_output=False),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, layer_plan)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=PART, use_local_output=False),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=PART, output_layouts=WHOLE),
    }
    return parallelize_module(model, mesh, plan)


if __name__ == "__main__":
    compare(__doc__, wrap, str(Path(__file__).with_suffix(".yaml")), shares_batch=True)
