"""A sequence shared out over GPUs: torchrun --nproc-per-node 2 examples/distributed/shared_sequence.py

Each rank has some tokens of every sequence. For attention it has some heads of all tokens instead. An all-to-all before
attention and one after it change between the two, as in DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509). The
number of ranks must divide that of key heads and that of tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from comparing import compare
from torch import Tensor, arange, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class SharedSequence(nn.Module):
    """A causal language model that runs this rank's tokens of each batch. Its loss is this rank's share of the mean."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.mesh, self.group = model, mesh, mesh.get_group()
        AttentionInterface.register("shared_sequence", self.attend)
        model.set_attn_implementation("shared_sequence")

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        """From and to this rank's tokens: (batch, heads, tokens, head size) to (batch, tokens, heads, head size)."""
        heads = map(self.exchange, (query, key, value))
        attended, _ = sdpa_attention_forward(module, *heads, mask, **settings)
        return self.exchange(attended), None

    def exchange(self, x: Tensor) -> Tensor:
        """Give away parts of dimension 1, and get all of dimension 2: heads for tokens, or tokens for heads."""
        parts = x.unflatten(1, (self.mesh.size(), -1)).movedim(1, 0).contiguous()
        return all_to_all_single_autograd(parts, None, None, self.group).movedim(0, 2).flatten(2, 3)

    def forward(self, input_ids: Tensor, labels: Tensor):
        next_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        positions = arange(input_ids.shape[1], device=input_ids.device)[None]
        ids, targets, positions = (
            each.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous()
            for each in (input_ids, next_labels, positions)
        )
        # DistributedDataParallel takes the mean of the ranks' gradients.
        mean_over = labels[:, 1:].numel() / self.mesh.size()
        return self.model(
            input_ids=ids, position_ids=positions, labels=targets, shift_labels=targets, num_items_in_batch=mean_over
        )


def wrap(model: PreTrainedModel, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(SharedSequence(model, mesh))


if __name__ == "__main__":
    compare(__doc__, wrap, "elementwise", shares_batch=True)
