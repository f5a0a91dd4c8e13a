"""Trains tiny models of transformers' architectures under presets: python examples/architectures/sweep.py

For each model type in transformers' auto mappings it takes a class with a head, a tiny configuration and a random
batch. It trains for seven steps of SGD without a policy, twice, to find out whether the model itself computes the same
bits again; and then as long under each preset. Losses, all gradients, and parameters and buffers at the end are
compared bit for bit. Each architecture has a process of its own, so that a crash or a hang costs one row.

Where kernels stand in, gradients are to be close, and the weights stay as they are. On a CPU a policy has to insist on
kernels, as kernels.yaml beside this file does. Their plain PyTorch references then compute, in float64 too:
--presets kernels.yaml --dtype float64

It writes results.json and results.md to the folder after --out, and goes on from what results.json has. It exits with 1
if anything is wrong.

    --only 'qwen*' 'gpt?'    model types that match one of these patterns
    --workers 8              processes at a time, of one thread each
    --debug                  in this process, with the tracebacks of what is wrong
"""

from __future__ import annotations

import sys

import series  # first, as it sets what other packages read when they are loaded
import transformers.modeling_utils
from configurations import architectures
from trials import STEPS, examine

PRESETS = ("elementwise", "full", "auto")


def main() -> int:
    transformers.logging.set_verbosity_error()
    items = {
        name: series.Item(name, {"task": each.task, "class": each.class_name}, each)
        for name, each in architectures().items()
    }
    return series.sweep(
        series.Series(
            "architectures",
            items,
            examine,
            PRESETS,
            STEPS,
            columns={"class": "class", "given": "is given", "gradients": "gradients not 0"},
            about=(
                f"{STEPS} steps of SGD of tiny models in training mode, with dropout. Kernels round in their own way: "
                "where they stand in, gradients may be close, as one vector a step. On a CPU `auto` has none"
            ),
        ),
        __doc__,
    )


if __name__ == "__main__":
    sys.exit(main())
