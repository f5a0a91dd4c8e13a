"""What the examples of losses share: a tiny model, texts with a part to learn, and a loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from recompute.kernels.linear_log_probs import linear_log_probs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IGNORED = -100
"""The label of what is not to be learned."""


def make_model(layers: int = 2, seed: int = 0, words: int = 256) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": words, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)).to(DEVICE)


def texts_and_labels(prompts: list[str], answers: list[str]) -> tuple[Tensor, Tensor]:
    """Bytes of prompts and answers, padded; and labels: the answers' bytes, and ``IGNORED`` for all else."""
    rows = [list((prompt + answer).encode()) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, text, prompt in zip(range(len(rows)), rows, prompts, strict=True):
        ids[row, : len(text)] = torch.tensor(text)
        labels[row, len(prompt) : len(text)] = ids[row, len(prompt) : len(text)]
    return ids.to(DEVICE), labels.to(DEVICE)


def log_probs(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """The logarithm of each label's probability, 0 where it is ignored: (batch, length - 1). No logits are made."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return linear_log_probs(hidden, model.lm_head.weight, labels[:, 1:])


def train(model: PreTrainedModel, loss_of: Callable[[], Tensor], steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
