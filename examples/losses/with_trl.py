"""TRL's trainers without logits: python examples/losses/with_trl.py ORPO  (or CPO, DPO, KTO, SFT)

`logits=False` has kernels compute what ORPO and CPO write on logits. The others have a fused head of TRL's own, which
makes none either: there the policy saves the memory of the layers.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from typing import Any

from datasets import Dataset
from toy import make_model
from transformers import ByT5Tokenizer

from recompute.integrations.transformers import RecomputeCallback

PROMPTS, GOOD, BAD = ["Is water wet? ", "Do fish fly? "], ["Yes.", "Hardly."], ["Who knows?", "All the time."]


def rows_of(name: str) -> list[dict[str, Any]]:
    triples = list(zip(PROMPTS, GOOD, BAD, strict=True))
    if name == "SFT":
        return [{"prompt": prompt, "completion": good} for prompt, good, _ in triples]
    if name == "KTO":
        rows = [(prompt, answer, answer is good) for prompt, good, bad in triples for answer in (good, bad)]
        return [{"prompt": prompt, "completion": answer, "label": label} for prompt, answer, label in rows]
    return [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in triples]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "ORPO"
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = importlib.import_module(f"trl.experimental.{name.lower()}" if name in ("ORPO", "CPO") else "trl")
    arguments = getattr(trl, f"{name}Config")(
        tempfile.mkdtemp(),
        **{"max_steps": 5, "logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "bf16": False},
        gradient_checkpointing=False,  # the policy is in its place
    )
    trainer = getattr(trl, f"{name}Trainer")(
        make_model(words=384),
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(name)),
        processing_class=ByT5Tokenizer(),
        callbacks=[RecomputeCallback("auto", logits=False)],
        **({"ref_model": make_model(words=384)} if name in ("DPO", "KTO") else {}),
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step'] - 1}: loss {float(entry['loss']):.4f}")


if __name__ == "__main__":
    main()
