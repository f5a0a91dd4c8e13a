"""Makes batches for models of Hugging Face: of tokens, images, sounds, or of tokens with an image in each sequence."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from recompute.engine.thread_state import is_fake
from recompute.errors import ModelError
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.layer_stacks import find_stacks, shortened

_PREDICTS_TOKENS = re.compile("CausalLM|LMHead|MaskedLM|ConditionalGeneration")
_IMAGE_PATCHES = 32
"""Along each side of an image, for a model that takes images of any size."""


def batch_of(
    model: Any, name: str, sequence_length: int, batch_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Random keyword arguments for a Hugging Face model, with labels if it takes any and predicts tokens.

    name: what to call the model in errors.

    On fake tensors each sequence has an image if the model takes images beside tokens, and if its forward runs so.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # of one that PEFT wraps
    config, given = model.config, model.main_input_name
    takes = inspect.signature(model.forward).parameters
    takes_labels = "labels" in takes and _PREDICTS_TOKENS.search(type(model).__name__)
    made: dict[str, Tensor] = {}
    if given == "pixel_values":
        shape: tuple[int, ...] = (config.num_channels, *_sides(config.image_size))
    elif given == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)  # a convolution halves them
    elif given == "input_values" and hasattr(config, "conv_stride"):
        shape = (sequence_length * math.prod(config.conv_stride),)
    elif given == "input_values" and hasattr(config, "num_mel_bins"):
        shape = (config.max_length, config.num_mel_bins)
    elif given != "input_ids":
        raise ModelError(
            f"{name}: no batch can be made for {type(model).__name__}, whose forward takes {given}; expected a model "
            "that takes tokens, images or audio. Name a function that returns (model, batch) instead"
        )
    if given != "input_ids":
        made[given] = torch.rand(batch_size, *shape, dtype=dtype, device=device)
        if not takes_labels:
            return made
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, each, None) for each in ("max_position_embeddings", "max_target_positions"))
    length = min(sequence_length, *(limit for limit in limits if limit), sequence_length)
    ids = torch.randint(text.vocab_size, (batch_size, length), device=device)
    labels = {"labels": ids} if takes_labels else {}
    if given != "input_ids":
        return made | labels
    if is_fake() and (images := _images(config, takes, ids, dtype)) and _runs(model, images):
        return images | ({"labels": images["input_ids"]} if labels else {})
    return {given: ids, **labels}


def _sides(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def takes_images(config: PretrainedConfig) -> bool:
    """Whether a model of tokens takes images among them."""
    return getattr(config, "vision_config", None) is not None and _image_token(config) is not None


def _image_token(config: PretrainedConfig) -> int | None:
    return getattr(config, "image_token_id", getattr(config, "image_token_index", None))


def _images(config: Any, takes: Any, ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tokens with an image at the start of each sequence; {} where it is not known what an image is, or too long."""
    vision: Any = getattr(config, "vision_config", None)
    token = _image_token(config)
    patch = getattr(vision, "patch_size", None)
    if token is None or not isinstance(patch, int) or "pixel_values" not in takes:
        return {}
    batch, length = ids.shape
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    made: dict[str, Tensor] = {}
    if "image_grid_thw" in takes and hasattr(vision, "spatial_merge_size"):
        tokens = (_IMAGE_PATCHES // vision.spatial_merge_size) ** 2
        pixels = channels * vision.temporal_patch_size * patch**2
        made["pixel_values"] = torch.rand(batch * _IMAGE_PATCHES**2, pixels, dtype=dtype, device=ids.device)
        grid = torch.tensor([[1, _IMAGE_PATCHES, _IMAGE_PATCHES]], device=ids.device)
        made["image_grid_thw"] = grid.expand(batch, 3).contiguous()
    elif hasattr(vision, "image_size"):
        sides = _sides(vision.image_size)
        tokens = getattr(config, "mm_tokens_per_image", None) or (sides[0] // patch) * (sides[1] // patch)
        made["pixel_values"] = torch.rand(batch, channels, *sides, dtype=dtype, device=ids.device)
    else:
        return {}
    if tokens >= length:
        return {}
    of_image = torch.arange(length, device=ids.device).lt(tokens).expand(batch, length)
    words = torch.zeros(batch, length, dtype=torch.int64, device=ids.device)
    made["input_ids"] = torch.where(of_image, token, words)
    kinds = {each: of_image.long() for each in ("token_type_ids", "mm_token_type_ids") if each in takes}
    return made | kinds


def _runs(model: Any, batch: dict[str, Tensor]) -> bool:
    for stacks in (find_stacks(model, None), []):  # a few layers tell as much, of most models
        try:
            with torch.no_grad(), as_on_cuda(), shortened(stacks, "fewer"):
                model(**batch)
        except Exception:  # whatever a model raises whose images are others
            continue
        return True
    return False
