"""Trains small models by the packages that people train with, and compares: python examples/workloads/workloads.py

Each row is a workload of a package (an adapter, a quantization, a trainer, a model), which trains for eight steps on a
CPU without a policy, twice, and then under each preset. The rows of packages that are not installed are left out:
pip install -e ".[workloads]" brings them all. The sweep itself is that of the architectures, in the folder beside this
one, with its options: --only 'peft*', --jobs 2, --debug for tracebacks, --fresh.

This makes the committed table again:

    python examples/workloads/workloads.py --fresh --jobs 2 --out examples/workloads/results/cpu

The guide's table of counts is the second one of the results.md that it writes.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "architectures"))

import series  # first, as it sets what other packages read when they are loaded
import torch
from workload import STEPS, WORKLOADS, examine

FILES = ("plain", "loops", "adapters", "quantization", "diffusion", "vision", "trainers", "alignment")
PACKAGES = {
    "transformers": "transformers.models.llama.modeling_llama",
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "diffusers": "diffusers.models.transformers",
    "higher": "higher",
    "lightning": "lightning.pytorch",
    "peft": "peft",
    "timm": "timm",
    "torchao": "torchao.quantization",
    "torchvision": "torchvision",
    "trl": "trl.trainer.grpo_trainer",
}
"""The distributions whose versions the record tells, and the module of each that takes long to load."""


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for file in FILES:
        importlib.import_module(file)
    there = {name: each for name, each in WORKLOADS.items() if each.installed}
    missing = sorted({each.package for each in WORKLOADS.values() if not each.installed})
    if missing:
        print(f"Not installed, and left out: {', '.join(missing)}")
    return series.sweep(
        series.Series(
            "workloads",
            {name: series.Item(name, {"package": each.package}, each) for name, each in there.items()},
            examine,
            ("elementwise", "full"),
            STEPS,
            columns={"gradients": "gradients"},
            about=f"{STEPS} steps of training of small models, with each package's own dropout, dtypes and optimizers",
            packages=tuple(PACKAGES),
            groups="package",
            prepare=load,
        ),
        __doc__,
    )


def load(items: list[series.Item]) -> None:
    needed = {name for item in items for name in item.subject.needs}
    for package in sorted(needed & PACKAGES.keys()):
        importlib.import_module(PACKAGES[package])


if __name__ == "__main__":
    sys.exit(main())
