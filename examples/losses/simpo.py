"""Simple Preference Optimization (arXiv 2405.14734) without logits: python examples/losses/simpo.py"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from toy import IGNORED, log_probs, make_model, texts_and_labels, train
from transformers import PreTrainedModel


def simpo_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """The first half of the batch was chosen; the second half, of the same prompts, was rejected."""
    means = log_probs(model, ids, labels).sum(-1) / (labels != IGNORED).sum(-1)
    chosen, rejected = means.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()


def main() -> None:
    model = make_model()
    prompts = ["Is water wet? ", "Do fish fly? "]
    ids, labels = texts_and_labels(prompts * 2, ["Yes.", "Hardly.", "Who knows?", "All the time."])
    train(model, lambda: simpo_loss(model, ids, labels))


if __name__ == "__main__":
    main()
