"""Training loops of others: transformers' Trainer, accelerate and Lightning."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from small_models import blocks, convolutions, image, llama, text
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from workload import STEPS, Run, adamw, seed, workload

# What is said to transformers' Trainer, by the name of the row.
TRAINERS: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "Trainer, accumulation and clipping": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    "Trainer, bfloat16": {"bf16": True},
    "Trainer, label smoothing": {"label_smoothing_factor": 0.1},
    "Trainer, NEFTune": {"neftune_noise_alpha": 5.0},
    "Trainer, Adafactor": {"optim": "adafactor"},
    "Trainer, its checkpoints": {"gradient_checkpointing": True},
    "Trainer, evaluation between steps": {"eval_strategy": "steps", "eval_steps": 2},
    "Trainer, an epoch that ends with fewer": {"per_device_train_batch_size": 3},
}


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 64, length: int = 48) -> None:
        seed(0)
        self._texts = [text(1, length) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self._texts[index].items()}


def define(name: str, options: dict[str, Any]) -> None:
    @workload("transformers", name, "accelerate")
    def train(run: Run) -> None:
        from transformers import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            settings = {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 2}
            arguments = TrainingArguments(
                folder,
                **{**settings, **options},
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            )
            model = run.govern(llama())
            Trainer(model, arguments, train_dataset=Texts(20), eval_dataset=Texts(4)).train()


for name, options in TRAINERS.items():
    define(name, options)


def accelerated(run: Run, accumulate: int = 1, **options: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), DataLoader(Texts(), batch_size=2))
    run.govern(model)
    batches = iter(loader)
    for step in range(STEPS * accumulate):
        seed(step)
        with accelerator.accumulate(model):
            accelerator.backward(model(**next(batches)).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@workload("accelerate", "a loop with clipping")
def accelerate_loop(run: Run) -> None:
    accelerated(run)


@workload("accelerate", "accumulation")
def accelerate_accumulation(run: Run) -> None:
    accelerated(run, accumulate=2)


@workload("accelerate", "bfloat16")
def accelerate_bfloat16(run: Run) -> None:
    accelerated(run, mixed_precision="bf16")


def lightning_fit(run: Run, make: Any, **options: Any) -> None:
    """Train what ``make`` returns, a LightningModule whose ``model`` is governed, by Lightning's Trainer."""
    from lightning.pytorch import Trainer

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = {"accelerator": "cpu", "max_steps": STEPS, "default_root_dir": folder, **quiet, **options}
        trainer = Trainer(**settings)
        module = make()
        run.govern(module.model)
        trainer.fit(module, DataLoader(Texts(), batch_size=2))


def automatic(**changes: Any) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(**changes)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.model)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Module()


# What is said to Lightning's Trainer, by the name of the row.
LIGHTNING: dict[str, dict[str, Any]] = {
    "automatic optimization": {},
    "accumulation and clipping": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "bfloat16 by autocast": {"precision": "bf16-mixed"},
    "bfloat16 throughout": {"precision": "bf16-true"},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def define_lightning(name: str, options: dict[str, Any]) -> None:
    @workload("lightning", name)
    def train(run: Run) -> None:
        lightning_fit(run, automatic, **options)


for name, options in LIGHTNING.items():
    define_lightning(name, options)


@workload("lightning", "an average of the weights")
def weight_averaging(run: Run) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    lightning_fit(run, automatic, callbacks=[EMAWeightAveraging(decay=0.9)])


@workload("lightning", "manual optimization of two models")
def manual(run: Run) -> None:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = nn.ModuleDict({"critic": blocks(), "generator": blocks()})

        def training_step(self, batch: dict[str, Tensor], index: int) -> None:
            seed(index)
            critic, generator = self.model["critic"], self.model["generator"]
            of_critic, of_generator = self.optimizers()
            fake = generator(torch.randn(4, 8, 32))
            self.manual_backward(critic(fake.detach()).mean() - critic(torch.randn(4, 8, 32)).mean())
            of_critic.step()
            of_critic.zero_grad()
            self.manual_backward(-critic(fake).mean())
            self.clip_gradients(of_generator, 0.5, "norm")
            of_generator.step()
            of_generator.zero_grad()

        def configure_optimizers(self) -> Any:
            return [adamw(each) for each in self.model.values()]

    lightning_fit(run, Module, max_steps=2 * STEPS)  # it counts the steps of both optimizers


@workload("lightning", "convolutions with batch norm")
def lightning_convolutions(run: Run) -> None:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = convolutions()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            seed(index)
            return self.model(image()).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    lightning_fit(run, Module)
