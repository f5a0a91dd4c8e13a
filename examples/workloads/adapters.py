"""PEFT's adapters on a small Llama."""

from __future__ import annotations

from typing import Any

import torch
from small_models import llama, text
from torch import nn
from workload import Run, workload

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Each adapter's configuration class and its arguments, by the name of the row.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "LoRA with dropout": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}),
    "rsLoRA": ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "use_dora": True, "lora_dropout": 0.1}),
    "PiSSA": ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "init_lora_weights": "pissa"}),
    "LoRA with biases": ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "lora_bias": True}),
    "LoRA on the head and the words": (
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    ),
    "modules to save": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "norms to save": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}),
    "trainable tokens beside LoRA": (
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]},
    ),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [5, 6, 7]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "VeRA": ("VeraConfig", {"r": 8, "target_modules": ["q_proj", "o_proj"]}),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 6, "target_r": 4, "total_step": 20, "tinit": 2, "tfinal": 2, "target_modules": PROJECTIONS},
    ),
    "OFT": ("OFTConfig", {"oft_block_size": 16, "target_modules": PROJECTIONS}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 8, "target_modules": ["q_proj", "v_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 4, "target_modules": PROJECTIONS, "module_dropout": 0.1}),
    "LoKr": ("LoKrConfig", {"r": 4, "target_modules": PROJECTIONS, "rank_dropout": 0.1}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 8, "encoder_hidden_size": 32}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "LLaMA adapter": ("AdaptionPromptConfig", {"adapter_len": 8, "adapter_layers": 2}),
    "LayerNorm tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 50, "target_modules": ["q_proj", "v_proj"]}),
    "HRA": ("HRAConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "VB-LoRA": (
        "VBLoRAConfig",
        {"r": 2, "topk": 2, "num_vectors": 16, "vector_length": 32, "target_modules": ["q_proj", "o_proj"]},
    ),
    "MiSS": ("MissConfig", {"r": 4, "target_modules": PROJECTIONS}),
    "RandLoRA": ("RandLoraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "C3A": ("C3AConfig", {"block_size": 16, "target_modules": ["q_proj", "o_proj"]}),
    "SHiRA": ("ShiraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "RoAd": ("RoadConfig", {"target_modules": ["q_proj", "o_proj"]}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 50, "target_modules": ["q_proj", "o_proj"]}),
}


def adapted(kind: str, options: dict[str, Any], base: nn.Module | None = None) -> Any:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(base if base is not None else llama(), config)


def define(name: str, kind: str, options: dict[str, Any]) -> None:
    @workload("peft", name)
    def train(run: Run) -> None:
        model = run.govern(adapted(kind, options))
        run.train(model, lambda: model(**text()).loss)


for name, (kind, options) in ADAPTERS.items():
    define(name, kind, options)

LORA = ("LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "lora_dropout": 0.05})


@workload("peft", "two adapters at once")
def two_adapters(run: Run) -> None:
    import peft

    model = adapted(*LORA)
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    run.govern(model)
    run.train(model, lambda: model(**text()).loss)


@workload("peft", "two adapters in turn")
def adapters_in_turn(run: Run) -> None:
    import peft

    model = adapted(*LORA)
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]))
    run.govern(model)
    names = ["default", "second"] * 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> Any:
        model.set_adapter(names.pop())
        return model(**text()).loss

    run.train(model, loss, optimizer)


@workload("peft", "an adapter that is off in every second step")
def adapter_off(run: Run) -> None:
    model = run.govern(adapted(*LORA))

    def loss() -> Any:
        batch = text()
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits
        return model(**batch).loss + (model(**batch).logits - reference).pow(2).mean()

    run.train(model, loss)


@workload("peft", "merged and unmerged between steps")
def merged_between_steps(run: Run) -> None:
    model = run.govern(adapted(*LORA))

    def loss() -> Any:
        model.merge_adapter()
        with torch.no_grad():
            model(**text())
        model.unmerge_adapter()
        return model(**text()).loss

    run.train(model, loss)


@workload("peft", "LoRA in bfloat16 under autocast")
def under_autocast(run: Run) -> None:
    model = run.govern(adapted(*LORA, base=llama().bfloat16()))

    def loss() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**text()).loss

    run.train(model, loss)


@workload("peft", "LoRA under the model's own checkpoints")
def under_checkpoints(run: Run) -> None:
    model = adapted(*LORA)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    run.govern(model)
    run.train(model, lambda: model(**text()).loss)


@workload("peft", "LoRA on Conv1D (GPT-2)")
def on_gpt2(run: Run) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    options = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    model = run.govern(adapted("LoraConfig", options, GPT2LMHeadModel(config)))
    run.train(model, lambda: model(**text()).loss)


@workload("peft", "LoRA on experts' parameters (Mixtral)")
def on_experts(run: Run) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"r": 2, "target_modules": ["q_proj"], "target_parameters": targets}
    model = run.govern(adapted("LoraConfig", options, MixtralForCausalLM(config)))
    run.train(model, lambda: model(**text()).loss)


@workload("peft", "LoRA on convolutions", "torchvision")
def on_convolutions(run: Run) -> None:
    import peft
    import torchvision
    from small_models import image

    config = peft.LoraConfig(r=4, target_modules=["conv1", "conv2"], modules_to_save=["fc"])
    model = run.govern(peft.get_peft_model(torchvision.models.resnet18(num_classes=8), config))
    run.train(model, lambda: model(image()).pow(2).mean())
