"""What tiny configurations need beside the general rules, by model type, and why."""

from __future__ import annotations

from typing import Any

# Three parts of half a head's 16 dimensions, which turn by time, height and width; the default is of large heads.
_OF_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}

CONSTRAINTS: dict[str, dict[str, Any]] = {
    # Attention in the second of two layers: by default it comes later.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # Heads times their size are expand times the hidden size.
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen2_vl_text": _OF_THREE,
    "qwen2_5_vl_text": _OF_THREE,
    # None by default, without which no place in the text stands for an image.
    "blip-2": {"image_token_index": 100},
    "instructblip": {"image_token_index": 100},
    "blt": {"encoder_hash_byte_group_vocab": 128},  # half a million rows
    "nemotron": {"num_key_value_heads": 2},  # None by default, which the model does not take
    # No length is right for all time series.
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
}
