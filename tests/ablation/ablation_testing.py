"""What ablations of the tests train, and a way to run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.results import AblationRow
from recompute.estimation.llama import ModelShape

TINY = AblationConfig(
    model=ModelShape(hidden_size=64, intermediate_size=172, layers=2, heads=4, kv_heads=2),
    policies=("none",), peers=(), sequence_lengths=(64,), steps=2, warmup=0, device="cpu",
)  # fmt: skip
LEAST = TINY.model_copy(
    update={
        "model": ModelShape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1),
        **{"sequence_lengths": (16,), "batch_size": 1},
    }
)
OWN = """
import os, signal, time, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))

def make():
    return nn.Sequential(Block(), Block()), torch.randn(64, 8)

def alone():
    return make()[0]

def fails():
    raise OSError("the disk is full")

def other_keyword():
    return make()[0], {"y": torch.randn(4, 8)}

def nothing():
    return nn.Sequential(), torch.randn(4, 8)

def crashing():
    os.kill(os.getpid(), signal.SIGSEGV)

def hanging():
    open("it hangs", "w").close()
    time.sleep(3600)

number = 3
"""


def quiet(what: str, done: int, total: int) -> None:
    pass


def started(out: Path, config: AblationConfig = TINY, **options: Any) -> run_ablation.RowRecorder:
    return run_ablation.run(config, out, **{"command": "recompute ablate", "progress": quiet, **options})


def run(out: Path, config: AblationConfig = TINY, *, progress: Any = quiet, **changes: Any) -> list[AblationRow]:
    """All rows of the configuration with these changes."""
    recorder = started(out, config.model_copy(update=changes), progress=progress)
    for _ in recorder:
        pass
    return list(recorder.rows)


def by_policy(rows: list[AblationRow]) -> dict[str, AblationRow]:
    return {row.policy: row for row in rows}


def saved(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))
