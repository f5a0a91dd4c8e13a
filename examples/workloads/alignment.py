"""TRL's trainers on a small Llama, a tokenizer made here and a few rows of text."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from typing import Any

from small_models import VOCABULARY, llama
from workload import STEPS, Run, workload

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
WORDS = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCABULARY))]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def sentence(index: int, length: int) -> str:
    return " ".join(WORDS[3 + (index * 7 + place * (index + 3)) % (VOCABULARY - 3)] for place in range(length))


def rows(kind: str) -> Any:
    """Rows of text as a kind of trainer takes them, of 8 to 15 words."""
    from datasets import Dataset

    made = []
    for index in range(32):
        prompt, one, other = (sentence(index + shift, 4 + index % 8) for shift in (0, 40, 80))
        made.append(
            {
                "text": {"text": f"{prompt} {one}"},
                "prompt": {"prompt": prompt},
                "pairs": {"prompt": prompt, "chosen": f" {one}", "rejected": f" {other}"},
                "labelled": {"prompt": prompt, "completion": f" {one}", "label": index % 3 > 0},
                "completion": {"prompt": prompt, "completion": f" {one}"},
            }[kind]
        )
    return Dataset.from_list(made)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(each.split())) / 8 + 0.01 * len(each) for each in completions]


def define(name: str, module: str, kind: str, data: str, *needs: str, **options: Any) -> None:
    """``module`` has ``kind``'s trainer and its configuration."""

    @workload("trl", name, "datasets", *needs)
    def train(run: Run) -> None:
        home = importlib.import_module(module)
        settings = {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-3, **options}
        adapter = settings.pop("adapter", None)
        of_trainer = settings.pop("of_trainer", {})
        with tempfile.TemporaryDirectory() as folder:
            arguments = getattr(home, f"{kind}Config")(
                folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=settings.pop("gradient_checkpointing", False),
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **settings,
            )
            if adapter:
                import peft

                of_trainer = {**of_trainer, "peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **adapter)}
            model = classifier() if kind == "Reward" else llama()
            if kind in ("DPO", "KTO") and not adapter and not settings.get("precompute_ref_log_probs"):
                of_trainer = {**of_trainer, "ref_model": copy.deepcopy(model)}
            trainer = getattr(home, f"{kind}Trainer")(
                model=model, args=arguments, train_dataset=rows(data), processing_class=tokenizer(), **of_trainer
            )
            run.govern(trainer.model)
            trainer.train()


def classifier() -> Any:
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


GENERATED = {"num_generations": 2, "max_completion_length": 8}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.05}

define("SFT", "trl", "SFT", "text", max_length=32)
define("SFT, its checkpoints", "trl", "SFT", "text", max_length=32, gradient_checkpointing=True)
define("SFT, prompts masked", "trl", "SFT", "completion", max_length=32, completion_only_loss=True)
define("SFT, LoRA", "trl", "SFT", "text", "peft", max_length=32, adapter=LORA)
define("DPO", "trl", "DPO", "pairs", max_length=32)
define("DPO, LoRA", "trl", "DPO", "pairs", "peft", max_length=32, adapter=LORA)
define("DPO, precomputed reference", "trl", "DPO", "pairs", max_length=32, precompute_ref_log_probs=True)
define("KTO", "trl", "KTO", "labelled", max_length=32)
define("ORPO", "trl.experimental.orpo", "ORPO", "pairs", max_length=32)
define("CPO", "trl.experimental.cpo", "CPO", "pairs", max_length=32)
define("reward model", "trl", "Reward", "pairs", max_length=32)
define("GRPO", "trl", "GRPO", "prompt", of_trainer={"reward_funcs": reward}, **GENERATED)
define(
    "GRPO, two updates a generation, LoRA",
    "trl",
    "GRPO",
    "prompt",
    "peft",
    of_trainer={"reward_funcs": reward},
    adapter=LORA,
    num_iterations=2,
    beta=0.1,
    **GENERATED,
)
define("RLOO", "trl", "RLOO", "prompt", beta=0.0, of_trainer={"reward_funcs": reward}, **GENERATED)
