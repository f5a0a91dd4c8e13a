"""LoRA: python examples/adapters/lora.py --model meta-llama/Llama-3.1-8B --tokens 8192

Without --model a small Llama is trained, also on a CPU.
"""

from __future__ import annotations

import torch
from loop import DEVICE, options_of, train
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    options = options_of(__doc__, policy="auto")
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(DEVICE)
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    train(get_peft_model(base, lora), options)
