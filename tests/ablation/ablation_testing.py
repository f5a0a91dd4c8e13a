"""What ablations of the tests train, and a way to run them."""

import json

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
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


MIB = 2**20
JUDGED = ("losses_match", "loss_error", "grads_match", "grad_error", "grad_error_last")


def row(policy, held=8 * MIB, peak=10 * MIB, seconds=0.1, **changes):
    """As results had rows before times had parts. It matches bit for bit."""
    measured = {"activation_bytes_held": held, "peak_bytes": peak, "step_seconds": seconds, "forward_cpu_seconds": None}
    matches = dict(zip(JUDGED, (True, 0.0, True, 0.0, 0.0), strict=True)) | {"exact": True, "grad_tolerance": 0.0}
    return {"policy": policy, "sequence_length": 64, **measured, **matches, "error": None, **changes}


def timed(policy, seconds=0.1, backward=0.05, **changes):
    """A row as it is written now, with all numbers."""
    found = row(policy, seconds=seconds)
    for name, value in (("step", seconds), ("forward", 0.03), ("backward", backward), ("optimizer", 0.01)):
        found |= {f"{name}_seconds": value, f"{name}_seconds_quartiles": [value * 0.9, value * 1.1]}
    facts = {"model": "m", "batch_size": 2, "dtype": "float32", "backward_added_seconds": backward - 0.05}
    static = {"parameter_bytes": MIB, "gradient_bytes": MIB, "optimizer_bytes": 2 * MIB, "logits_bytes_held": 3 * MIB}
    more = {"losses": [1.0], "timings": [{"step": [seconds]}], "longest_sequence": 4096}
    return {**found, **facts, **static, **more, **changes}


def results(*rows, complete=True, **config):
    shape = {"hidden_size": 64, "intermediate_size": 172, "layers": 2, "heads": 4, "kv_heads": 2}
    machine = {"cpu": "a CPU", "threads": 2, "gpu": None, "torch": "2.11.0", "transformers": "5.0.0"}
    sizes = {"model": shape, "batch_size": 4, "sequence_lengths": [64], "dtype": "float32", "steps": 8}
    return {
        "complete": complete,
        "command": "recompute ablate",
        "config": {**sizes, **config},
        "machine": {**machine, "python": "3.11.7", "date": "2026-01-02T03:04:05+00:00"},
        "text": {"source": "a text", "nbytes": 1000},
        "rows": list(rows),
    }


def quiet(what, done, total):
    pass


def started(out, config=TINY, **options):
    return run_ablation.run(config, out, **{"command": "recompute ablate", "progress": quiet, **options})


def run(out, config=TINY, *, progress=quiet, **changes):
    """All rows of the configuration with these changes."""
    recorder = started(out, config.model_copy(update=changes), progress=progress)
    for _ in recorder:
        pass
    return list(recorder.rows)


def by_policy(rows):
    return {row.policy: row for row in rows}


def matching(rows):
    """The rows by policy: each was measured, and has the gradients that it promises."""
    found = by_policy(rows)
    assert {policy: (row.error, row.grads_match) for policy, row in found.items()} == dict.fromkeys(found, (None, True))
    return found


def saved(out):
    return json.loads((out / "results.json").read_text(encoding="utf-8"))
