"""Train a small byte-level Llama with Hugging Face's Trainer, under the policy that its arguments name.

python examples/train_with_trainer.py                                  # reads examples/trainer.yaml
python examples/train_with_trainer.py --output_dir out --max_steps 20 --recompute_policy auto
python examples/train_with_trainer.py --large --bf16 --output_dir out --max_steps 20 --recompute_policy auto

--large is the shape of Llama 1B and pieces of 4096 bytes: for a GPU.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer

from recompute.integrations.transformers import RecomputeTrainingArguments

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
LARGE = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    use_cache=False,
)


@dataclass
class Size:
    large: bool = field(default=False, metadata={"help": "the shape of Llama 1B, sequence 4096"})


def main() -> None:
    parser = HfArgumentParser([RecomputeTrainingArguments, Size])
    if len(sys.argv) > 1:
        arguments, size = parser.parse_args_into_dataclasses()
    else:
        arguments, size = parser.parse_yaml_file(Path(__file__).with_name("trainer.yaml"))

    torch.manual_seed(0)
    config, length = (LARGE, 4096) if size.large else (SMALL, 128)
    with arguments.device:
        model = LlamaForCausalLM(config)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    pieces = text[: len(text) // length * length].view(-1, length)

    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces])
    trainer.train()

    for last in [entry for entry in trainer.state.log_history if "loss" in entry][-1:]:
        for key, value in last.items():
            print(f"{key}: {value:,}")


if __name__ == "__main__":
    main()
