"""`recompute doctor`: what is in the way of a run, and what to type against it, as estimates have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import transformers
from tiers import slow

import recompute
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.gpus import find_gpu
from recompute.planning.doctor_command import Diagnosis, DoctorRequest, Remedy

GPU = find_gpu("RTX 4090")
SHAPE = {**models.SHAPE, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "num_hidden_layers": 2}
LENGTH = 512


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(**SHAPE).save_pretrained(folder)
    return folder / "config.json"


def diagnose(config: Path, memory: str = "23GiB", **options: Any) -> Diagnosis:
    asked = EstimateOptions("bfloat16", options.pop("optimizer", "adamw"), "none", 1, "full", **options)
    given: dict[str, Any] = {"gpu": "rtx4090", "gpu_memory": memory, "batch_size": 1, "seq_len": LENGTH}
    return DoctorRequest.checked(model=str(config), options=asked, **given).run(lambda what, done, total: None)


def estimated(config: Path, remedy: Remedy) -> int:
    """The peak that ``recompute.estimate`` has for the changes of a remedy."""
    options: dict[str, Any] = {}
    for change in remedy.changes:
        if change == "a chunked cross-entropy":
            options["loss"] = "chunked"
        elif change.startswith("fsdp2"):
            options |= {"sharding": "fsdp2", "devices": remedy.devices}
        else:
            name, _, value = change.partition(" ")
            options[name] = value
    return recompute.estimate(str(config), seq_len=LENGTH, gpu=GPU.name, advise=False, **options).peak_bytes


@pytest.mark.parametrize(
    ("share", "way", "devices"), [(0.75, "logits", 1), *slow((1.0, "logits", 1), (0.45, "static memory", 2))]
)
def test_what_to_type_fits_and_is_what_estimates_say(share: float, way: str, devices: int, config: Path) -> None:
    plain = recompute.estimate(str(config), seq_len=LENGTH, gpu=GPU.name, advise=False)
    capacity = int(share * plain.peak_bytes)
    found = diagnose(config, f"{capacity}B")
    assert found.now.peak_bytes == plain.peak_bytes
    assert found.fits == (share == 1)
    assert found.in_the_way == way
    assert 1 <= len(found.remedies) <= 3
    assert [each.seconds for each in found.remedies] == sorted(each.seconds for each in found.remedies)
    assert {each.devices for each in found.remedies} == {devices}
    for each in found.remedies:
        assert each.peak_nbytes == estimated(config, each) <= capacity
    assert found.by_adapters is None or devices > 1
