"""A small model learns from a larger one, without the logits of either: python examples/losses/distillation.py

--top-k: from the words alone that the teacher finds most probable, as a server would send them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from toy import IGNORED, make_model, texts_and_labels, train
from transformers import PreTrainedModel

from recompute.kernels.linear_divergence import linear_divergence


def distillation_loss(
    student: PreTrainedModel, teacher: PreTrainedModel, ids: Tensor, labels: Tensor, kind: str = "jsd"
) -> Tensor:
    hidden = student.model(input_ids=ids).last_hidden_state[:, :-1]
    with torch.no_grad():
        taught = teacher.model(input_ids=ids).last_hidden_state[:, :-1]
    divergence = linear_divergence(hidden, student.lm_head.weight, taught, teacher.lm_head.weight, kind=kind, beta=0.1)
    counts = labels[:, 1:] != IGNORED
    return (divergence * counts).sum() / counts.sum()


def top_k_loss(student: PreTrainedModel, log_probs: Tensor, words: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """log_probs, words: (batch, length - 1, K), the teacher's."""
    hidden = student.model(input_ids=ids).last_hidden_state[:, :-1]
    all_words = torch.zeros_like(log_probs[..., 0])  # the logarithm of the sum of all their probabilities
    divergence = linear_divergence(
        hidden, student.lm_head.weight, log_probs, teacher_indices=words, teacher_logsumexp=all_words
    )
    counts = labels[:, 1:] != IGNORED
    return (divergence * counts).sum() / counts.sum()


def main() -> None:
    teacher, student = make_model(layers=4, seed=1).requires_grad_(False), make_model()
    ids, labels = texts_and_labels(["Is water wet? ", "Do fish fly? "], ["Yes.", "Hardly."])
    if "--top-k" in sys.argv:
        with torch.no_grad():
            log_probs, words = teacher(input_ids=ids).logits[:, :-1].log_softmax(-1).topk(16)
        train(student, lambda: top_k_loss(student, log_probs, words, ids, labels))
    else:
        train(student, lambda: distillation_loss(student, teacher, ids, labels))


if __name__ == "__main__":
    main()
