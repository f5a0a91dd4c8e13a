"""Run in each of two processes: a Trainer under DDP, with a policy and without; for ``test_two_processes``."""

import sys
from pathlib import Path

import torch
from torch import distributed
from trainer_testing import ACCUMULATED, STEPS, MeasuredTrainer, arguments, logged, model

from recompute.integrations.transformers import RecomputeTrainingArguments


class Counting(MeasuredTrainer):
    """(right, all) tokens of each micro-batch, from whole logits."""

    def compute_loss(self, net, inputs, *given, **options):
        with torch.no_grad():
            logits = self.model.eval()(input_ids=inputs["input_ids"]).logits[:, :-1]
        self.model.train()
        target = inputs["labels"][:, 1:]
        counts = target != -100
        self.counts.append([int(((logits.argmax(-1) == target) & counts).sum()), int(counts.sum())])
        return super().compute_loss(net, inputs, *given, **options)


def main():
    torch.set_num_threads(1)
    found = []
    without_logits = {"recompute_policy": "auto", "recompute_kwargs": {"logits": False}}
    for policy in ({}, {"recompute_policy": "elementwise"}, without_logits):
        options = {"max_steps": 2 * STEPS, "ddp_backend": "gloo", "learning_rate": 0.05, **policy}
        trainer = Counting(model(), arguments(Path(sys.argv[1]), RecomputeTrainingArguments, **options))
        trainer.counts = []
        trainer.train()
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        assert len(trainer.counts) == 2 * STEPS * ACCUMULATED
        found.append(trainer)
    plain, hooks, fused = found
    assert logged(hooks, "loss") == logged(plain, "loss")
    assert max(hooks.held) < 0.8 * min(plain.held)
    assert logged(hooks, "token_accuracy") == []
    torch.testing.assert_close(logged(fused, "loss"), logged(plain, "loss"), rtol=1e-4, atol=0)
    counts = torch.tensor(fused.counts).view(2 * STEPS, ACCUMULATED, 2).sum(1)
    own = (counts[:, 0] / counts[:, 1]).tolist()
    distributed.all_reduce(counts)
    expected = (counts[:, 0] / counts[:, 1]).tolist()
    assert own != expected, "both have the same tokens: this shows nothing"
    torch.testing.assert_close(logged(fused, "token_accuracy"), expected, rtol=1e-6, atol=0)
    print("two trainers agree")


if __name__ == "__main__":
    main()
