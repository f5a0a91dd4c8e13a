"""Kahneman-Tversky Optimization (arXiv 2402.01306) without logits: python examples/losses/kto.py"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from toy import log_probs, make_model, texts_and_labels, train
from transformers import PreTrainedModel


def kto_loss(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    batch: tuple[Tensor, Tensor],
    mismatched: tuple[Tensor, Tensor],
    is_desirable: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """mismatched: the prompts with answers to other prompts, which tell how far the model is from the reference."""

    def ratios(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            before = log_probs(reference, ids, labels).sum(-1)
        return log_probs(model, ids, labels).sum(-1) - before

    with torch.no_grad():
        distance = ratios(*mismatched).mean().clamp_min(0)
    gains = beta * (ratios(*batch) - distance)
    return (1 - torch.sigmoid(torch.where(is_desirable, gains, -gains))).mean()


def main() -> None:
    model = make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    prompts, answers = ["Is water wet? ", "Do fish fly? ", "Is it late? "], ["Yes.", "All the time.", "Not yet."]
    batch, mismatched = texts_and_labels(prompts, answers), texts_and_labels(prompts, answers[1:] + answers[:1])
    is_desirable = torch.tensor([True, False, True], device=batch[0].device)
    train(model, lambda: kto_loss(model, reference, batch, mismatched, is_desirable))


if __name__ == "__main__":
    main()
