"""Odds Ratio Preference Optimization (arXiv 2403.07691) without logits: python examples/losses/orpo.py"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from toy import IGNORED, log_probs, make_model, texts_and_labels, train
from transformers import PreTrainedModel


def orpo_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor, weight: float = 0.1) -> Tensor:
    """The first half of the batch was chosen; the second half, of the same prompts, was rejected."""
    means = log_probs(model, ids, labels).sum(-1) / (labels != IGNORED).sum(-1)
    chosen, rejected = means.chunk(2)
    log_odds = [each - torch.log(-torch.expm1(each)) for each in (chosen, rejected)]
    return (-chosen - weight * F.logsigmoid(log_odds[0] - log_odds[1])).mean()


def main() -> None:
    model = make_model()
    prompts = ["Is water wet? ", "Do fish fly? "]
    ids, labels = texts_and_labels(prompts * 2, ["Yes.", "Hardly.", "Who knows?", "All the time."])
    train(model, lambda: orpo_loss(model, ids, labels))


if __name__ == "__main__":
    main()
