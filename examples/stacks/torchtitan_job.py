"""A job of torchtitan 0.3 under a policy; PYTHONPATH has examples/stacks:

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_job --config llama3_8b --compile.enable
"""

from __future__ import annotations

from typing import Any

from torchtitan.models.llama3 import config_registry

from recompute.integrations.torchtitan import RecomputeAC


def llama3_8b() -> Any:
    config = config_registry.llama3_8b()
    config.activation_checkpoint = RecomputeAC.Config(policy="elementwise")
    return config
