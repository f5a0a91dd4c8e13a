"""Group Relative Policy Optimization (arXiv 2402.03300) without logits, with a bonus for entropy.

python examples/losses/grpo.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from toy import IGNORED, make_model, texts_and_labels, train
from transformers import PreTrainedModel

from recompute.kernels.linear_log_probs import linear_log_probs


def log_probs_and_entropies(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return linear_log_probs(hidden, model.lm_head.weight, labels[:, 1:], temperature=temperature, entropy=True)


def grpo_loss(
    model: PreTrainedModel,
    batch: tuple[Tensor, Tensor],
    sampled: Tensor,
    advantages: Tensor,
    temperature: float = 0.9,
    epsilon: float = 0.2,
    bonus: float = 0.01,
) -> Tensor:
    """sampled: the log-probabilities of the policy that the answers were sampled from."""
    current, entropies = log_probs_and_entropies(model, *batch, temperature)
    ratios = torch.exp(current - sampled)
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - epsilon, 1 + epsilon) * advantages)
    counts = batch[1][:, 1:] != IGNORED
    return -((gains + bonus * entropies) * counts).sum() / counts.sum()


def main() -> None:
    model = make_model()
    batch = texts_and_labels(["Is water wet? "] * 4, ["Yes.", "Who knows?", "Yes, very.", "No."])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], device=batch[0].device)
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None]
    with torch.no_grad():
        sampled, _ = log_probs_and_entropies(model, *batch, 0.9)
    train(model, lambda: grpo_loss(model, batch, sampled, advantages))


if __name__ == "__main__":
    main()
