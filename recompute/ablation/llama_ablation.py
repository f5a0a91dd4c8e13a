"""Trains a Llama on text under each of several policies, as a configuration file says."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, Strict
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import LlamaForCausalLM

from recompute import counters
from recompute.ablation.peers import BASELINE, Peer, treatments
from recompute.ablation.trials import AblationRow, Experiment, Progress, recorded
from recompute.counters import resolve_device
from recompute.errors import AblationError
from recompute.estimation.check_paths import check_writable
from recompute.estimation.llama import ModelShape, build_llama

_TEXT_NBYTES = 4 << 20  # of the standard library: more than a run's batches can visit


SequenceLength = Annotated[int, Field(ge=2)]


class AblationConfig(BaseModel):
    """What to train and how long. The defaults suit two CPU cores; `default_config` knows a GPU's.

    policies: preset names, and paths of policy files from the current folder; `none` always runs, first.
    compile: whether each policy also runs, as `POLICY+compile`, with every layer compiled by torch.compile.
    step: what is trained and measured: "training" is forward, loss, backward and optimizer; "layers" is forward and
        backward of all but the head, the loss and the optimizer, whose weights stay as they are.
    steps: training steps a policy; the first `warmup` of them are not timed, except where no other is left.
    text: the file to train on, as bytes; None is the source of Python's standard library.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: ModelShape = ModelShape()
    policies: Annotated[tuple[str, ...], Strict(False)] = (BASELINE, "full", "hook", "elementwise", "kernel")
    compile: bool = False
    peers: Annotated[tuple[Peer, ...], Strict(False)] = ("torch-checkpoint",)
    sequence_lengths: Annotated[tuple[SequenceLength, ...], Strict(False), Field(min_length=1)] = (256,)
    batch_size: PositiveInt = 4
    step: Literal["training", "layers"] = "training"
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: PositiveInt = 12
    warmup: Annotated[int, Field(ge=0)] = 6
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    text: Annotated[Path | None, Strict(False)] = None

    def treatments(self) -> tuple[str, ...]:
        """What each sequence length is trained under, beginning with the baseline."""
        return treatments(self.policies, self.peers, compiled=self.compile)


LLAMA_1B = AblationConfig(
    model=ModelShape(hidden_size=2048, intermediate_size=8192, layers=16, heads=32, kv_heads=8),
    policies=("none", "full", "hook", "elementwise", "kernel", "auto"),
    peers=("torch-checkpoint", "torch-selective"),
    sequence_lengths=(4096,),
    batch_size=1,
    dtype="bfloat16",
    learning_rate=1e-4,
)


def default_config(device: str = "auto") -> AblationConfig:
    """A Llama-1B shape if `device` is a GPU or "auto" finds one; otherwise a small model that two cores can train."""
    config = LLAMA_1B if resolve_device(device).type == "cuda" else AblationConfig()
    return config.model_copy(update={"device": device})


def run(config: AblationConfig, out: Path, *, command: str, progress: Progress) -> Iterator[AblationRow]:
    """Train under each policy at each sequence length, and yield each row once ``out/results.json`` holds it.

    Beside ``rows`` that file has ``machine``, ``config``, ``text`` and the `command` that led to it. It is replaced as
    a whole each time, so an interrupted run leaves the rows until then, with ``complete`` false.

    Raises `AblationError` for a text or a device that cannot be used. A policy that fails has an ``error`` in its row.
    """
    device = resolve_device(config.device)
    source, text = load_text(config.text)
    if len(text) < (longest := max(config.sequence_lengths)):
        raise AblationError(f"{source}: expected a text of at least {longest} bytes; found {len(text)}")
    check_writable(out, error=AblationError, is_folder=True)
    results: dict[str, Any] = {
        "command": command,
        "complete": False,
        "machine": counters.describe_machine(device),
        "config": config.model_dump(mode="json"),
        "text": {"source": source, "nbytes": len(text)},
    }
    yield from recorded(results, _rows(config, text, device, progress), out)


def load_text(path: Path | None) -> tuple[str, bytes]:
    """A name for the text, and its bytes: those of the file, or of the standard library's modules, sorted by name."""
    if path is not None:
        try:
            return path.name, path.read_bytes()
        except OSError as error:
            raise AblationError(f"{path}: the text cannot be read: {error.strerror}") from error
    text = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= _TEXT_NBYTES:
            break
    return f"standard library of Python {sys.version.split()[0]}", bytes(text[:_TEXT_NBYTES])


def _rows(config: AblationConfig, text: bytes, device: torch.device, progress: Progress) -> Iterator[AblationRow]:
    for length in config.sequence_lengths:
        experiment = Experiment(
            make=lambda: build_model(config, device),
            loss=partial(_loss, config),
            batches=sample_batches(config, text, length).to(device).unbind(),
            optimizer=partial(AdamW, lr=config.learning_rate, fused=True),
            device=device,
            progress=progress,
            # For bfloat16, float32 is exact enough, and has the fused attention without which memory runs out.
            wider=torch.float32 if config.dtype == "bfloat16" else torch.float64,
            warmup=config.warmup,
            updates=config.step == "training",
            seed=config.seed,
            sequence_length=length,
            token_elements=config.batch_size * length * config.model.layers * config.model.hidden_size,
        )
        yield from experiment.rows(config.treatments())


def _loss(config: AblationConfig, model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """The model's own loss; of the layers alone a weighted sum of their output, which holds nothing for backward."""
    if config.step == "training":
        return model(input_ids=batch, labels=batch).loss
    hidden = model.get_decoder()(input_ids=batch).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return F.linear(hidden, weights[None]).mean()


def build_model(config: AblationConfig, device: torch.device) -> LlamaForCausalLM:
    """The model of an ablation, in training mode on ``device``; leaves the global random state as it was."""
    dtype = getattr(torch, config.dtype)
    positions = max(config.sequence_lengths)
    return build_llama(config.model, positions=positions, dtype=dtype, device=device, seed=config.seed)


def sample_batches(config: AblationConfig, text: bytes, length: int) -> Tensor:
    """Windows of `text` at random places: (steps, batch, length) int64, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(text) - length + 1, (config.steps, config.batch_size), generator=generator)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[starts[..., None] + torch.arange(length)].long()
