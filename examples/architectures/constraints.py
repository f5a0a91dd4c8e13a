"""What tiny configurations need beside the general rules, by model type, and why."""

from __future__ import annotations

from typing import Any

# Half of a head's 16 dimensions in three parts, for time, height and width. The default is for larger heads.
_OF_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}

_HALF = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}

CONSTRAINTS: dict[str, dict[str, Any]] = {
    # Attention in the second of two layers: by default it comes later.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # Heads times their size are expand times the hidden size.
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "glm4v_text": _OF_THREE,
    "glm4v_moe_text": {"rope_parameters": {**_OF_THREE["rope_parameters"], **_HALF}},
    "glm_ocr_text": _OF_THREE,
    "qwen2_vl_text": _OF_THREE,
    "qwen2_5_vl_text": _OF_THREE,
    # By default there is none, and then no token in the text stands for an image.
    "blip-2": {"image_token_index": 100},
    "instructblip": {"image_token_index": 100},
    "blt": {"encoder_hash_byte_group_vocab": 128},  # half a million rows
    # The default is the largest of its kind, with 66 million parameters whatever the hidden size.
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    # Positions are in rows and columns: 4 times 4 is the sequence's length, and 16 plus 48 the hidden size.
    "reformer": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 48)},
    # None by default, which these models do not take.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "wav2vec2-conformer": {"vocab_size": 128},
    "xmod": {"default_language": "en_XX"},
}
