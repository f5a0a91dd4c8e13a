"""A Llama and texts small enough for a Trainer in tests, and a Trainer that looks at memory."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recompute.counters import memory_trace

VOCABULARY, LENGTH, TEXTS, BATCH = 512, 24, 8, 2
STEPS, ACCUMULATED = 2, 2
MANY = 40_000  # words, of which logits are the most there is
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(vocabulary=VOCABULARY, **options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, use_cache=False, **SHAPE, **options))


def texts(count=TEXTS):
    """Of each, another number of tokens has no loss."""
    found = []
    for index in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index + 1] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


DEFAULTS = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED,
    "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
    "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


def arguments(folder, kind=TrainingArguments, **options):
    return kind(output_dir=str(folder), **{**DEFAULTS, **options})


class MeasuredTrainer(Trainer):
    """Of each micro-batch: bytes held after forward, and at the peak, above those before it; and the loss."""

    def __init__(self, *given, **options):
        super().__init__(*given, train_dataset=texts(), eval_dataset=texts(4), **options)
        self.held = []
        self.peaks = []

    def compute_loss(self, *given, **options):
        result = super().compute_loss(*given, **options)
        if self.model.training:
            self._trace.mark("forward")
        return result

    def training_step(self, *given, **options):
        with memory_trace(torch.device("cpu")) as self._trace:
            result = super().training_step(*given, **options)
        self.held.append(self._trace.held_nbytes["forward"])
        self.peaks.append(self._trace.peak_nbytes)
        return result


def trained(folder, *callbacks, of=None, kind=TrainingArguments, **options):
    """A trainer that has trained ``of``, or a new Llama."""
    trainer = MeasuredTrainer(of or model(), arguments(folder, kind, **options), callbacks=list(callbacks))
    trainer.train()
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def right_tokens(net, batch):
    """(right, all) tokens of a batch, from whole logits."""
    with torch.no_grad():
        logits = net.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    net.train()
    target = batch["labels"][:, 1:]
    counts = target != -100
    return int(((logits.argmax(-1) == target) & counts).sum()), int(counts.sum())


def assert_same_weights(found, expected):
    """Bit for bit."""
    one, other = found.model.state_dict(), expected.model.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def in_two_processes(script, *arguments, **environment):
    """What both of them print that run ``script``, a file beside this one, as the ranks of one group."""
    both = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *both, str(Path(__file__).with_name(script)), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
