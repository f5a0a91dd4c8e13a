"""What the scripts beside this one share: their options, a small model where no other is named, and a training loop."""

from __future__ import annotations

import argparse
import inspect
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import recompute

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def options_of(description: str | None, policy: str) -> Any:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=None, help="a folder or name of Hugging Face's; a small Llama by default")
    parser.add_argument("--policy", default=policy, help="a preset, or the path of a policy file")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    options.model = options.model or small_model()
    return options


def small_model() -> str:
    """The folder of a small Llama, whose words are bytes."""
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes)).save_pretrained(folder)
    return folder


def train(model: Any, options: Any) -> None:
    """Some steps under the policy, and what it drops; on CUDA also the peak."""
    model.train()  # from_pretrained leaves it off
    handle = recompute.apply(model, options.policy)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    text: Tensor = torch.tensor(list(inspect.getsource(inspect).encode()), device=DEVICE)
    batch = text[: options.tokens][None]
    for step in range(options.steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    stats = handle.stats()
    print(f"policy {options.policy}: {stats.dropped_nbytes:,} bytes dropped, {stats.kept_nbytes:,} kept")
    if DEVICE.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the peak, with weights and optimizer")
