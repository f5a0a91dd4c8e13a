"""LLaMA-Factory under a policy: python examples/stacks/train_with_llamafactory.py examples/stacks/llamafactory.yaml

On several GPUs: torchrun --nproc-per-node 8, and the same two files. Written for LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from recompute.integrations.transformers import RecomputeCallback

if __name__ == "__main__":
    run_exp(callbacks=[RecomputeCallback("auto", logits=False)])
