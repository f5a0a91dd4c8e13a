"""Train a small byte-level Llama with Hugging Face's Trainer, under the policy that its arguments name.

python examples/train_with_trainer.py                                  # reads examples/trainer.yaml
python examples/train_with_trainer.py --output_dir out --max_steps 20 --recompute_policy auto
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer

from recompute.integrations.transformers import RecomputeTrainingArguments

LENGTH = 128


def main() -> None:
    parser = HfArgumentParser(RecomputeTrainingArguments)
    if len(sys.argv) > 1:
        (arguments,) = parser.parse_args_into_dataclasses()
    else:
        (arguments,) = parser.parse_yaml_file(Path(__file__).with_name("trainer.yaml"))

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces])
    trainer.train()

    for last in [entry for entry in trainer.state.log_history if "loss" in entry][-1:]:
        for key, value in last.items():
            print(f"{key}: {value:,}")


if __name__ == "__main__":
    main()
