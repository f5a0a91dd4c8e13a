"""Finds the module that a user wrote inside of what compiles or wraps it."""

from __future__ import annotations

import sys

from torch import nn


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside of what ``torch.compile`` returned; ``module`` itself if it is none of these."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # it takes seconds to load, and wraps nothing until then
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without ``torch.compile``, ``DistributedDataParallel``, ``DataParallel`` and PEFT's adapters."""
    while True:
        model = uncompiled(model)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif callable(get := getattr(model, "get_base_model", None)):  # of PEFT
            return get()
        else:
            return model
