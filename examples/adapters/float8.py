"""float8 by torchao, all weights trained: python examples/adapters/float8.py --model meta-llama/Llama-3.1-8B

On a GPU each layer is compiled, without which float8 is slow; on a CPU float8 is emulated. Without --model a small
Llama is trained.
"""

from __future__ import annotations

import torch
from loop import DEVICE, options_of, train
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModelForCausalLM


def is_in_a_layer(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in path


if __name__ == "__main__":
    options = options_of(__doc__, policy="elementwise")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(DEVICE)
    config = Float8LinearConfig(emulate=DEVICE.type == "cpu")
    model = convert_to_float8_training(model, config=config, module_filter_fn=is_in_a_layer)
    for layer in model.model.layers if DEVICE.type == "cuda" else ():
        layer.compile(fullgraph=True)
    train(model, options)
