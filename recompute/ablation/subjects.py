"""Makes what an ablation trains: a model with the same weights each time it is asked for, and a batch for each step."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, LlamaForCausalLM, PretrainedConfig

from recompute.ablation.ablation_config import AblationConfig, Comparison, HuggingFaceFields
from recompute.ablation.results import place_of, varied
from recompute.ablation.trials import Experiment, Progress, seeded
from recompute.diagnostics.comparing_runs import wider_dtype
from recompute.errors import AblationError, ModelError
from recompute.estimation.build_model import build, refusals_named
from recompute.estimation.check_paths import check_source
from recompute.estimation.factories import (
    Factory,
    call,
    check_batch,
    check_factory,
    describe,
    load_factory,
    loss_in,
    make,
    placed,
)
from recompute.estimation.llama import ModelShape, build_llama
from recompute.files import user_path
from recompute.policy.document import nearest

_TEXT_NBYTES = 4 << 20  # of the standard library: more than a run's batches can visit


def experiment_of(comparison: Comparison, text: bytes, device: torch.device, progress: Progress) -> Experiment:
    """What trains the model of a comparison under a policy or peer, and measures it.

    Raises ``ModelError`` or ``AblationError`` for a model that cannot be made.
    """
    config, source = comparison.config, comparison.source
    common: dict[str, Any] = {
        "optimizer": partial(AdamW, lr=config.learning_rate, fused=True),
        "progress": progress,
        "wider": torch.float64 if comparison.dtype == "float32" else torch.float32,
        "autocast": torch.bfloat16 if comparison.dtype == "autocast" else None,
        "warmup": config.warmup,
        "updates": config.step == "training",
        "seed": config.seed,
        "facts": comparison.facts,
        "place": place_of(comparison.facts, varied(each.facts for each in config.comparisons())),
    }
    dtype, length, batch_size = _dtype_of(comparison.dtype), comparison.sequence_length, comparison.batch_size
    if length is None or batch_size is None:
        own = FactorySubject(load_factory(str(source)), None, config.steps, config.seed, dtype, device)
        return own.experiment(**common)
    config = config.model_copy(update={"batch_size": batch_size, "sequence_lengths": (length,)})
    make: Callable[[], nn.Module]
    layers: int | None
    hidden: int | None
    if isinstance(source, ModelShape):
        config = config.model_copy(update={"model": source, "dtype": comparison.dtype})
        make, layers, hidden = partial(build_model, config, device), source.layers, source.hidden_size
        batches = [{"input_ids": ids, "labels": ids} for ids in sample_batches(config, text, length).to(device)]
    else:
        read = hugging_face_source(comparison)
        sizes: dict[str, Any] = {"sequence_length": length, "batch_size": batch_size, "dtype": dtype}
        model: Any
        model, shapes = build(read, device=torch.device("meta"), seed=config.seed, **sizes)
        fields = model.config.get_text_config()
        layers, hidden = getattr(fields, "num_hidden_layers", None), getattr(fields, "hidden_size", None)
        make = lambda: build(read, device=device, seed=config.seed, **sizes)[0]  # noqa: E731
        ids = sample_batches(config, text, length) if "input_ids" in shapes else [None] * config.steps
        with seeded(config.seed, device):
            batches = [_batch_like(shapes, each, fields, device) for each in ids]
    elements = batch_size * length * layers * hidden if layers and hidden else None
    return Experiment(
        make=make, loss=_LOSSES[config.step], batches=batches, device=device, token_elements=elements, **common
    )


def hugging_face_source(comparison: Comparison) -> str | PretrainedConfig:
    """What ``build`` makes the model of. Raises ``ModelError`` where transformers knows no such model."""
    source, where = comparison.source, f"models.{comparison.model}"
    if isinstance(source, HuggingFaceFields):
        return _configuration(source.model_dump(), where)
    assert isinstance(source, str), "a Llama's shape is built by build_llama"
    try:
        check_source(source)
    except ModelError as error:
        raise ModelError(f"{where}: {error}; or a mapping with a model_type") from error
    return source


def _configuration(fields: dict[str, Any], where: str) -> PretrainedConfig:
    """The configuration of these fields. transformers itself takes a misspelled one for an attribute, and is silent."""
    with refusals_named(where):
        found = AutoConfig.for_model(**fields)
        default = type(found)()
    for name in fields:
        guess = "" if hasattr(default, name) else nearest(name, vars(default))
        if guess:  # without one it may be an attribute that a model asks for, though no configuration lists it
            raise ModelError(f"{where}.{name}: {type(found).__name__} has no such field{guess}")
    return found


def _batch_like(shapes: Any, ids: Tensor | None, fields: Any, device: torch.device) -> dict[str, Tensor]:
    """A batch of these keys and shapes: token ids are the text's bytes, and numbers are random."""

    def values(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or ids is None:
            return torch.rand(tensor.shape, dtype=tensor.dtype, device=device)
        return ids.remainder(fields.vocab_size).to(device)

    return tree_map_only(Tensor, values, dict(shapes))


def _loss_of_training(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return loss_in(model(**batch), type(model).__name__)


def _loss_of_layers(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A weighted sum of the decoder's output, which holds nothing for backward."""
    hidden = model.get_decoder()(input_ids=batch["input_ids"]).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return F.linear(hidden, weights[None]).mean()


_LOSSES = {"training": _loss_of_training, "layers": _loss_of_layers}


def _dtype_of(name: str) -> torch.dtype:
    """The dtype of the weights."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_text(path: Path | None) -> tuple[str, bytes]:
    """A name for the text, and its bytes: those of the file, or of the standard library's modules, sorted by name."""
    if path is not None:
        try:
            return path.name, user_path(path).read_bytes()
        except OSError as error:
            raise AblationError(f"{path}: the text cannot be read: {error.strerror}") from error
    text = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= _TEXT_NBYTES:
            break
    return f"standard library of Python {sys.version.split()[0]}", bytes(text[:_TEXT_NBYTES])


def build_model(config: AblationConfig, device: torch.device) -> LlamaForCausalLM:
    """The Llama of a configuration's ``model``, in training mode on ``device``.

    Leaves the global random state as it was.
    """
    dtype, positions = _dtype_of(config.dtype), max(config.sequence_lengths)
    return build_llama(config.model, positions=positions, dtype=dtype, device=device, seed=config.seed)


def sample_batches(config: AblationConfig, text: bytes, length: int) -> Tensor:
    """Windows of `text` at random places: (steps, batch, length) int64, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(text) - length + 1, (config.steps, config.batch_size), generator=generator)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[starts[..., None] + torch.arange(length)].long()


class FactorySubject:
    """What a function of the caller's own makes: models with equal weights, and one batch for each step."""

    def __init__(
        self,
        factory: Factory,
        batch: Any,
        steps: int,
        seed: int,
        dtype: torch.dtype | None,
        device: torch.device,
        loss: Callable[[Any], Tensor] | None = None,
    ):
        self.name = getattr(factory, "__qualname__", type(factory).__name__)
        self._factory = check_factory(factory, self.name)
        self._seed, self._dtype, self._device, self._loss = seed, dtype, device, loss
        model, own = self._make()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError(f"{self.name}: expected a model with parameters to train; {type(model).__name__} has none")
        self._weights = _fingerprint(model)
        found = _batches(own, batch, steps, seed, device, self.name)
        self.batches = [placed(each, dtype=dtype, device=device) for each in found]
        self.description = describe(model, self.batches[0])
        self._wider = wider_dtype(model)

    def experiment(self, *, progress: Progress | None, **options: Any) -> Experiment:
        """What trains the model. options: further ones of an ``Experiment``."""
        own = {"make": self.model, "loss": self.loss, "batches": self.batches, "device": self._device}
        known: dict[str, Any] = {"wider": self._wider, "seed": self._seed, **own, **options}
        return Experiment(progress=progress or (lambda what, done, total: None), **known)

    def _make(self) -> tuple[nn.Module, Any]:
        with seeded(self._seed, self._device):
            return make(self._factory, self.name, dtype=self._dtype, device=self._device)

    def model(self) -> nn.Module:
        model, _ = self._make()
        if _fingerprint(model) != self._weights:
            raise AblationError(
                f"{self.name} gives other weights when it is called again with the same random state, so that policies "
                "cannot be compared: have it draw from the default generators of torch, NumPy or Python alone"
            )
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = call(model, batch)
        return loss_in(output, self.name) if self._loss is None else self._loss(output)


def _batches(own: Any, batch: Any, steps: int, seed: int, device: torch.device, name: str) -> list[Any]:
    """One batch for each step: the factory's own, the one given, or what the function given returns."""
    if own is not None and batch is not None:
        raise AblationError(f"{name} returns a batch, and one is passed, too: drop either")
    if own is None and batch is None:
        raise AblationError(f"expected a batch: pass one, or have {name} return (model, batch)")
    if callable(batch) and not isinstance(batch, (Tensor, Mapping)):
        with seeded(seed, device):
            return [check_batch(batch(), "batch") for _ in range(steps)]
    return [own if batch is None else check_batch(batch, "batch")] * steps


def _fingerprint(model: nn.Module) -> list[tuple[float, float]]:
    """Two sums of each parameter, by which models with other weights are told apart."""
    with torch.no_grad():
        wide = (parameter.double().flatten() for parameter in model.parameters())
        return [(each.sum().item(), each.square().sum().item()) for each in wide]
