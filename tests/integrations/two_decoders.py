"""A Hugging Face decoder whose layers kernels stand in for, trained by two processes: with DDP and FSDP2."""

import torch
import torch.distributed as dist
import transformers
from torch import nn
from two_processes import distributed

import recompute

VOCABULARY, STEPS = 40, 3
POLICY = {
    "version": 1,
    "name": "layers",
    "rules": [
        {"type": ["*DecoderLayer", "*RMSNorm"], "action": "recompute", "via": "kernel"},
        {"match": "**.lm_head", "action": "recompute", "via": "kernel"},
    ],
}


class Decoder(nn.Module):
    """Has its layers where ``distributed`` looks for them."""

    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).train()

    @property
    def layers(self):
        return self.model.model.layers

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False)


def _train(how, first):
    torch.manual_seed(0)
    model = Decoder()
    if first == "policy":
        recompute.apply(model, POLICY)
    wrapped = distributed(model, how)
    if first == "wrapper":
        recompute.apply(model, POLICY)
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = wrapped(torch.randint(0, VOCABULARY, (2, 12), generator=generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.to_local() if hasattr(p, "to_local") else p.detach() for p in wrapped.parameters())]


def kernels_train_as_without(how, first):
    """The largest relative difference that the policy makes to a loss, or to a weight after some steps.

    first: what is put on first, "policy" or "wrapper".
    """
    pairs = zip(_train(how, first), _train(how, None), strict=True)
    return max(((found - plain).norm() / plain.norm().clamp_min(1e-12)).item() for found, plain in pairs)
