"""The tables of peaks in these pages, calculated: python examples/adapters/peaks.py --tokens 4096 8192 16384

Whole peaks in GiB of Llama 3 8B in bfloat16: weights, gradients, optimizer and activations.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import recompute

POLICIES = ("none", "full", "elementwise", "auto")
NF4_SPARES = 2 - (0.5 + 4 / 64)  # bytes a weight: 4 bits and, for 64 of them, a float32
CONFIG = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    use_cache=False,
)


def gib_of_lora(policy: str, tokens: int, rank: int = 16, config: LlamaConfig = CONFIG) -> tuple[float, float]:
    """The peak under LoRA on all Linears of the layers, and what the same on weights in NF4 has less."""
    with torch.device("meta"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        spares = NF4_SPARES * sum(each.weight.numel() for each in base.model.modules() if isinstance(each, nn.Linear))
        lora = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear")
        model = get_peft_model(base, lora, autocast_adapter_dtype=False).train()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    found = recompute.estimate(model, batch=batch, policy=policy, gpu="H100", advise=False)
    return found.peak_bytes / 2**30, spares / 2**30


def gib_of_all_weights(policy: str, tokens: int, devices: int, config: LlamaConfig = CONFIG) -> float:
    """The peak of each GPU where all weights train: by FSDP2 and AdamW, and on one GPU by AdamW with 8-bit states."""
    how = {"sharding": "fsdp2", "devices": devices} if devices > 1 else {"optimizer": "adamw-8bit"}
    found = recompute.estimate(config, seq_len=tokens, policy=policy, gpu="H100", advise=False, **how)
    return found.peak_bytes / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    options = parser.parse_args()
    for policy in POLICIES:
        found = [gib_of_lora(policy, tokens) for tokens in options.tokens]
        print(f"| LoRA | `{policy}` | " + " | ".join(f"{peak:.1f}" for peak, _ in found) + " |", flush=True)
        if policy != "elementwise":
            print(f"| QLoRA | `{policy}` | " + " | ".join(f"{peak - less:.1f}" for peak, less in found) + " |")
    for devices in (1, 4, 8):
        for policy in POLICIES:
            cells = [f"{gib_of_all_weights(policy, tokens, devices):.1f}" for tokens in options.tokens]
            print(f"| all weights, {devices} GPUs | `{policy}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
