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
from transformers import AutoConfig

from recompute.ablation.ablation_config import Comparison, HuggingFaceFields, is_factory
from recompute.ablation.trials import Experiment, Progress, seeded
from recompute.diagnostics.comparing_runs import wider_dtype
from recompute.errors import AblationError, ModelError
from recompute.estimation import factories
from recompute.estimation.adapt_model import adapted
from recompute.estimation.adapters import Adapters
from recompute.estimation.build_model import Source, build, refusals_named
from recompute.estimation.check_paths import check_source
from recompute.files import user_path
from recompute.policy.document import nearest

_TEXT_NBYTES = 4 << 20  # of the standard library: more than a run's batches can visit


def experiment_of(comparison: Comparison, text: bytes, device: torch.device, progress: Progress) -> Experiment:
    """The experiment that trains the model of a comparison under a policy or peer, and measures it.

    Raises ``ModelError`` or ``AblationError`` for a model that cannot be made.
    """
    config, length, batch_size = comparison.config, comparison.sequence_length, comparison.batch_size
    dtype = torch.bfloat16 if comparison.dtype == "bfloat16" else torch.float32  # of the weights
    common: dict[str, Any] = {
        "optimizer": partial(AdamW, lr=config.learning_rate, fused=True),
        "progress": progress,
        "wider": torch.float64 if comparison.dtype == "float32" else torch.float32,
    }
    source = model_source(comparison)
    if length is None or batch_size is None:
        return factory_experiment(comparison, source, None, device, dtype=dtype, **common)
    sizes: dict[str, Any] = {"sequence_length": length, "batch_size": batch_size, "dtype": dtype, "seed": config.seed}
    if config.lora is not None:
        trained: Any = {"adapters": Adapters(config.lora), "dtype": torch.float32, "compute_dtype": dtype}
        sizes["adapt"] = partial(adapted, **trained)
    model: Any
    model, shapes = build(source, device=torch.device("meta"), **sizes)
    fields = model.config.get_text_config()
    layers, hidden = getattr(fields, "num_hidden_layers", None), getattr(fields, "hidden_size", None)
    ids = windows(text, config.steps, batch_size, length, config.seed)

    def values(tensor: Tensor, step: int) -> Tensor:
        """Token ids are the text's bytes, and numbers are random."""
        if tensor.is_floating_point() or "input_ids" not in shapes:
            return torch.rand(tensor.shape, dtype=tensor.dtype, device=device)
        return ids[step].remainder(fields.vocab_size).to(device)

    with seeded(config.seed, device):
        batches = [tree_map_only(Tensor, partial(values, step=step), dict(shapes)) for step in range(config.steps)]
    return Experiment(
        comparison,
        make=lambda: build(source, device=device, **sizes)[0],
        loss=partial(_loss, config.step),
        batches=batches,
        device=device,
        token_elements=batch_size * length * layers * hidden if layers and hidden else None,
        **common,
    )


def model_source(comparison: Comparison) -> Any:
    """The source of the model: a factory, or what ``build`` takes.

    Raises ``ModelError`` where there is no such factory, and where transformers knows no such model.
    """
    source: Any = comparison.source
    where = f"models.{comparison.model}"
    if isinstance(source, HuggingFaceFields):
        return _configuration(source.model_dump(), where)
    if is_factory(source):
        return factories.load_factory(source)
    try:
        if isinstance(source, str):
            check_source(source)
    except ModelError as error:
        raise ModelError(f"{where}: {error}; or a mapping with a model_type") from error
    return source


def _configuration(fields: dict[str, Any], where: str) -> Source:
    """The configuration of these fields. transformers itself takes a misspelled one for an attribute, and is silent."""
    with refusals_named(where):
        found = AutoConfig.for_model(**fields)
        default = type(found)()
    for name in fields:
        guess = "" if hasattr(default, name) else nearest(name, vars(default))
        if guess:  # without one it may be an attribute that a model asks for, though no configuration lists it
            raise ModelError(f"{where}.{name}: {type(found).__name__} has no such field{guess}")
    return found


def _loss(step: str, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's own loss; of the layers, a weighted sum of the decoder's output, which holds nothing for backward."""
    if step == "training":
        return factories.loss_in(model(**batch), type(model).__name__)
    hidden = model.get_decoder()(input_ids=batch["input_ids"]).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return F.linear(hidden, weights[None]).mean()


def load_text(path: Path | None) -> tuple[str, bytes]:
    """A name for the text, and its bytes: those of the file, or of the standard library's modules, sorted by name."""
    if path is not None:
        try:
            return path.name, user_path(path).read_bytes()
        except OSError as error:
            raise AblationError(f"{path}: the text cannot be read: {error.strerror}") from error
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)[:_TEXT_NBYTES]
    return f"standard library of Python {sys.version.split()[0]}", text


def windows(text: bytes, steps: int, batch_size: int, length: int, seed: int) -> Tensor:
    """Parts of ``text`` at random places: (steps, batch, length) int64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (steps, batch_size), generator=generator)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[starts[..., None] + torch.arange(length)].long()


def factory_experiment(
    comparison: Comparison,
    factory: factories.Factory,
    batch: Any,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **options: Any,
) -> Experiment:
    """The experiment on the models that a caller's own function makes. options: further ones of an ``Experiment``."""
    name, seed = getattr(factory, "__qualname__", type(factory).__name__), comparison.config.seed
    factories.check_factory(factory, name)

    def made() -> tuple[nn.Module, Any]:
        with seeded(seed, device):
            return factories.make(factory, name, dtype=dtype, device=device)

    model, own = made()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{name}: expected a model with parameters to train; {type(model).__name__} has none")
    weights = _fingerprint(model)
    with seeded(seed, device):
        found = _batches(own, batch, comparison.config.steps, name)
    batches = [factories.placed(each, dtype=dtype, device=device) for each in found]

    def again() -> nn.Module:
        model, _ = made()
        if _fingerprint(model) != weights:
            raise AblationError(
                f"{name} returned other weights when it was called again with the same random state, so policies "
                "cannot be compared. Draw only from the default generators of torch, NumPy and Python"
            )
        return model

    def total(model: nn.Module, batch: Any) -> Tensor:
        output = factories.call(model, batch)
        return factories.loss_in(output, name) if loss is None else loss(output)

    known = {"wider": wider_dtype(model), "description": factories.describe(model, batches[0])}
    return Experiment(comparison, again, total, batches, device, **{**known, **options})


def _batches(own: Any, batch: Any, steps: int, name: str) -> list[Any]:
    """One batch for each step: the factory's own, the one given, or what the function given returns."""
    if own is not None and batch is not None:
        raise AblationError(f"{name} returns a batch, and a batch is passed as well. Drop one of them")
    if own is None and batch is None:
        raise AblationError(f"a batch is missing. Pass one, or have {name} return (model, batch)")
    if callable(batch) and not isinstance(batch, (Tensor, Mapping)):
        return [factories.check_batch(batch(), "batch") for _ in range(steps)]
    return [own if batch is None else factories.check_batch(batch, "batch")] * steps


def _fingerprint(model: nn.Module) -> list[tuple[float, float]]:
    """Two sums of each parameter. They tell apart models with different weights."""
    with torch.no_grad():
        wide = (parameter.double().flatten() for parameter in model.parameters())
        return [(each.sum().item(), each.square().sum().item()) for each in wide]
