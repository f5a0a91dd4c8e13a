"""Makes batches for a model: random tensors for the arguments of its forward, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from configurations import FIRST_SPECIAL, IMAGE
from torch import Tensor
from transformers import PretrainedConfig

BATCH, LENGTH, PADDED, MERGED = 2, 16, 4, 4
FIRST_WORD = 3  # of a vocabulary: below are padding, beginning and end
OF_TOKENS = ("seq2seq", "speech", "masked", "image-text", "causal")


def batches(model: Any, task: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Batches that the model may take, the fullest first: for each its content in words, and a function that makes it.

    Only a run tells whether the model takes one, since configurations do not have all shapes of images and sounds.
    """
    make = _Maker(model, task)
    for seen in make.images() if make.takes("pixel_values") else [{}]:
        for heard in make.sounds() if make.takes("input_features", "input_values") else [{}]:
            if not (seen or heard):
                continue
            shapes = ", ".join(_shapes({**seen, **heard}))
            if make.takes("input_ids"):
                yield f"text, {shapes}", partial(make.around, seen, heard)
            else:
                yield shapes, partial(make.alone, seen, heard)
    if make.takes("input_ids"):
        alone = " alone" if make.takes("pixel_values", "input_features", "input_values") else ""
        yield f"text{alone}", partial(make.around, {}, {})


class _Maker:
    def __init__(self, model: Any, task: str):
        self._model = model
        self._config: PretrainedConfig = model.config
        self._task = task
        self._names: Collection[str] = inspect.signature(model.forward).parameters.keys()
        self._generator = torch.Generator().manual_seed(0)

    def takes(self, *names: str) -> bool:
        return any(name in self._names for name in names)

    def _ids(self, *shape: int) -> Tensor:
        return torch.randint(FIRST_WORD, FIRST_SPECIAL, shape, generator=self._generator)

    def _rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def around(self, seen: dict[str, Any], heard: dict[str, Any]) -> dict[str, Any]:
        """Token ids with places for images and sounds, padded in the last row; and the tensors that go with them."""
        ids = self._ids(BATCH, LENGTH)
        for token, count in self._places(seen, heard):
            ids = torch.cat([torch.full((BATCH, count), token), ids], dim=1)
        mask = torch.ones_like(ids)
        mask[-1, -PADDED:] = 0
        ids[-1, -PADDED:] = 0
        batch = {"input_ids": ids, **seen, **heard, **self.decoded(), **self.labels(ids, mask)}
        if self.takes("attention_mask"):
            batch["attention_mask"] = mask
        if self.takes("bbox"):
            corner = torch.randint(0, 500, (*ids.shape, 2), generator=self._generator)
            batch["bbox"] = torch.cat([corner, corner + 100], dim=-1)
        if self.takes("mm_token_type_ids") and seen:
            batch["mm_token_type_ids"] = (ids == self._token("image")).long()
        if self.takes("qformer_input_ids"):
            batch["qformer_input_ids"] = self._ids(BATCH, LENGTH)
        return batch

    def alone(self, seen: dict[str, Any], heard: dict[str, Any]) -> dict[str, Any]:
        return {**self.labels(), **self.decoded(), **seen, **heard}

    def decoded(self) -> dict[str, Any]:
        return {"decoder_input_ids": self._ids(BATCH, LENGTH)} if self.takes("decoder_input_ids") else {}

    def labels(self, ids: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Any]:
        """Where the class computes a loss that the task is known for."""
        if not self.takes("labels"):
            return {}
        if self._task in ("image", "audio"):
            return {"labels": torch.randint(self._config.num_labels, (BATCH,), generator=self._generator)}
        if self._task == "ctc":
            return {"labels": self._ids(BATCH, 4)}
        if self._task not in OF_TOKENS:
            return {}
        if ids is None or mask is None or self.takes("decoder_input_ids"):
            return {"labels": self._ids(BATCH, LENGTH)}
        return {"labels": ids.masked_fill((mask == 0) | (ids >= FIRST_SPECIAL), -100)}

    def images(self) -> Iterator[dict[str, Any]]:
        """Whole images; images in tiles; and rows of patches with the grid that they are of."""
        config = _inner(self._config, ("vision_config", "vq_config", "image_config", "backbone_config"))
        size = _first(config, ("image_size", "img_size", "input_size"), IMAGE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = _first(config, ("num_channels", "in_channels", "in_chans", "num_input_channels"), 3)
        channels = channels if isinstance(channels, int) else 3
        patch = _first(config, ("patch_size",), 16)
        patch = patch if isinstance(patch, int) else patch[0] if isinstance(patch, (list, tuple)) else 16
        whole = (channels, height, width)
        for grid in ("image_grid_thw", "grid_thw"):
            if self.takes(grid):
                frames = _first(config, ("temporal_patch_size",), 1)
                for each in (frames, 1):
                    yield {
                        "pixel_values": self._rand(BATCH * MERGED**2, channels * each * patch**2),
                        grid: torch.tensor([[1, MERGED, MERGED]] * BATCH),
                    }
        if self.takes("spatial_shapes"):
            yield {
                "pixel_values": self._rand(BATCH, MERGED**2, channels * patch**2),
                "pixel_attention_mask": torch.ones(BATCH, MERGED**2, dtype=torch.long),
                "spatial_shapes": torch.tensor([[MERGED, MERGED]] * BATCH),
            }
        beside: dict[str, Any] = {}
        if self.takes("aspect_ratio_ids"):
            beside["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
            beside["aspect_ratio_mask"] = torch.ones(BATCH, 1, _first(config, ("max_num_tiles",), 1), dtype=torch.long)
            beside["aspect_ratio_mask"][:, :, 1:] = 0
        yield {"pixel_values": self._rand(BATCH, *whole), **beside}
        if self.takes("image_sizes"):
            beside["image_sizes"] = torch.tensor([[height, width]] * BATCH)
            yield {"pixel_values": self._rand(BATCH, *whole), **beside}
        for tiles in (1, 2, 3):
            yield {"pixel_values": self._rand(BATCH, tiles, *whole), **beside}
        frames = _first(config, ("num_frames", "frames_per_clip"), 2)
        yield {"pixel_values": self._rand(BATCH, frames, *whole)}
        yield {"pixel_values": self._rand(BATCH, 1, 1, *whole)}
        yield {"pixel_values": self._rand(BATCH, (height // patch) * (width // patch), channels * patch**2)}

    def sounds(self) -> Iterator[dict[str, Any]]:
        """Spectrograms, by band or by frame, or waves."""
        config = _inner(self._config, ("audio_config", "encoder_config", "audio_encoder_config"))
        bands = _first(config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", "input_dim"), 80)
        frames = 2 * _first(config, ("max_source_positions",), 64)
        if self.takes("input_features"):
            masks = ("input_features_mask", "feature_attention_mask", "padding_mask")
            mask = {name: torch.ones(BATCH, frames, dtype=torch.long) for name in masks if self.takes(name)}
            for shape in ((BATCH, bands, frames), (BATCH, frames, bands), (BATCH, 1, frames, bands)):
                yield {"input_features": self._rand(*shape), **mask}
            return
        yield {"input_values": 0.1 * self._rand(BATCH, 8000)}
        yield {"input_values": self._rand(BATCH, 1, 8000)}
        yield {"input_values": self._rand(BATCH, _first(config, ("max_length",), frames), bands)}

    def _token(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_placeholder_id")
        return next((value for name in names if isinstance(value := getattr(self._config, name, None), int)), None)

    def _places(self, seen: dict[str, Any], heard: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """The token ids that stand for images and sounds, and how many of each a row needs."""
        for kind, given in (("image", seen), ("audio", heard)):
            token = self._token(kind)
            find = getattr(self._model, f"get_{kind}_features", None)
            if token is None or not given or find is None:
                continue
            known = inspect.signature(find).parameters
            parameter = next(self._model.parameters())
            placed = {
                name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
                for name, value in given.items()
                if name in known
            }
            with torch.no_grad():
                found = find(**placed)
            yield token, _count(found) // BATCH


def _count(features: Any) -> int:
    """How many vectors there are in a tensor, in several, or in what a tower returns."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if isinstance(features, (list, tuple)):
        return sum(map(_count, features))
    pooled = getattr(features, "pooler_output", None)
    return _count(features.last_hidden_state if pooled is None else pooled)


def _inner(config: Any, names: tuple[str, ...]) -> Any:
    """The configuration of a tower, where there is one."""
    return next((inner for name in names if isinstance(inner := getattr(config, name, None), PretrainedConfig)), config)


def _first(config: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), otherwise)


def _shapes(given: dict[str, Any]) -> list[str]:
    main = ("pixel_values", "input_features", "input_values")
    return [f"{name} {'x'.join(map(str, value.shape))}" for name, value in given.items() if name in main]
