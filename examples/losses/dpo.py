"""Direct Preference Optimization (arXiv 2305.18290) without logits: python examples/losses/dpo.py"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F
from toy import log_probs, make_model, texts_and_labels, train
from transformers import PreTrainedModel


def dpo_loss(
    model: PreTrainedModel, reference: PreTrainedModel, ids: Tensor, labels: Tensor, beta: float = 0.1
) -> Tensor:
    """The first half of the batch was chosen; the second half, of the same prompts, was rejected."""
    with torch.no_grad():
        before = log_probs(reference, ids, labels).sum(-1)
    chosen, rejected = (log_probs(model, ids, labels).sum(-1) - before).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def main() -> None:
    model = make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    prompts = ["Is water wet? ", "Do fish fly? "]
    ids, labels = texts_and_labels(prompts * 2, ["Yes.", "Hardly.", "Who knows?", "All the time."])
    train(model, lambda: dpo_loss(model, reference, ids, labels))


if __name__ == "__main__":
    main()
