"""QLoRA, a LoRA on weights of 4 bits: python examples/adapters/qlora.py --model meta-llama/Llama-3.1-8B --tokens 8192

Without --model a small Llama is trained, also on a CPU.
"""

from __future__ import annotations

import torch
from loop import DEVICE, options_of, train
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

if __name__ == "__main__":
    options = options_of(__doc__, policy="full")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=nf4, device_map={"": DEVICE}
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)  # which is on by default
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    train(get_peft_model(base, lora), options)
