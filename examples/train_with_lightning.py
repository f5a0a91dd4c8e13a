"""Train a small byte-level Llama with Lightning, under a policy.

python examples/train_with_lightning.py                    # the default policy; no bit of any gradient changes
python examples/train_with_lightning.py --policy auto --steps 20
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from recompute.integrations.lightning import RecomputeCallback

LENGTH, BATCH = 128, 8


class Decoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="elementwise", help="a preset, or the path of a policy file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()

    seed_everything(0)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    trainer = Trainer(
        callbacks=[RecomputeCallback(options.policy, module="model", logits=False)],
        max_steps=options.steps,
        log_every_n_steps=1,
        accelerator=options.accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Decoder(), DataLoader(pieces, batch_size=BATCH))

    for key, value in trainer.logged_metrics.items():
        print(f"{key}: {value.item():,}")


if __name__ == "__main__":
    main()
