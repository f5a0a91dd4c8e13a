"""A LightningModule around the Llama of the Trainer's tests, which counts what its training steps hold."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Lightning
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader
from trainer_testing import ACCUMULATED, BATCH, STEPS, model, texts

from recompute.estimation.storage_tracker import StorageTrace


class Decoder(LightningModule):
    """Of each training step: bytes that it leaves, those at its peak, and its loss."""

    def __init__(self, net=None, learning_rate=0.01):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = net or model()
        self.held = []
        self.peaks = []
        self.losses = []

    def training_step(self, batch, batch_idx):
        with StorageTrace() as trace:
            loss = self.model(**batch).loss
            trace.mark("forward")
        self.held.append(trace.held_nbytes["forward"])
        self.peaks.append(trace.peak_nbytes)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Records(DummyLogger):
    """What a Trainer writes down, a mapping a time."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append(dict(metrics))

    def of(self, key):
        return [entry[key] for entry in self.entries if key in entry]


DEFAULTS = {
    "max_steps": STEPS, "accumulate_grad_batches": ACCUMULATED, "log_every_n_steps": 1, "accelerator": "cpu",
    "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def lightning(folder, *callbacks, **options):
    options = {"default_root_dir": folder, "logger": Records(), **DEFAULTS, **options}
    return Lightning(callbacks=list(callbacks), **options)


def batches(epochs=1):
    """The texts, over and over; of each there are as many as one step of two ranks takes."""
    return DataLoader(texts() * epochs, batch_size=BATCH)


def fitted(folder, *callbacks, of=None, **options):
    """A LightningModule that has been trained, with what its Trainer wrote down as ``records``."""
    module = of or Decoder()
    trainer = lightning(folder, *callbacks, **options)
    trainer.fit(module, batches(4), batches())
    module.records = trainer.logger
    return module


def assert_same_training(found, expected):
    """Losses and weights, bit for bit."""
    assert found.losses == expected.losses
    assert len(found.losses) > 1
    one, other = found.state_dict(), expected.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
