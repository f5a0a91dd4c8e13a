"""Lists the architectures that transformers knows, and makes a tiny configuration of each from its class's defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from constraints import CONSTRAINTS
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, HEADS, HEAD, LAYERS, VOCABULARY, IMAGE = 64, 4, 16, 2, 128, 64
FIRST_SPECIAL = 96  # token ids from here on mean something, as an image's place does; 0 to 2 pad, begin and end

# Tasks, and the mappings that name classes for them. Of each model type, the first task that it has a class for counts.
TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}

# Attributes, by patterns of their names, and what they become. The first pattern that matches a name counts.
COUNTS: list[tuple[str, int]] = [
    (r".*vocab_size", VOCABULARY),
    (r"num_(hidden_)?layers|n_layers?|depth|num_blocks|num_(encoder|decoder|transformer|attention)_layers", LAYERS),
    (r"(.*_)?(encoder|decoder)_(num_hidden_|num_)?(layers|blocks)|.*_num(_hidden)?_layers|[lxr]_layers", LAYERS),
    (r"(num_|n_|moe_num_|num_local_|n_routed_)experts", 4),
    (r"(num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_?k|router_top_k|num_selects)", 2),
    (r"n_group|topk_group|num_expert_group|(moe_)?(num|n)_shared_experts?|mamba_(n_groups|ngroups)", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len", 128),
]
SIZES: list[tuple[str, int]] = [
    (r".*(key_value|kv)_heads|num_key_value_attention_heads|multi_query_group_num|.*num_key_heads", 2),
    (r".*attention_heads|(.*_)?num_heads|n_heads?|.*num_value_heads|index_n_heads|mamba_n_heads", HEADS),
    (r"(?!qk_head_dim).*head_dim|rotary_dim|d_kv|kv_channels|.*lora_rank|attention_head_size", HEAD),
    (r"(.*_)?(moe|shared|expert).*(intermediate_size|ffn.*size)", 32),
    (r".*intermediate_(size|dim)|.*ffn_(dim|hidden_size|size)|d_ff|dff|.*dim_feedforward|.*mlp_dim", 2 * HIDDEN),
    (r"n_embe?d|(.*_)?d_model|.*(hidden|embed|embedding|proj|projection|projector)_(size|dim)|dim|emb_dim", HIDDEN),
    (r"entity_emb_size|output_dim|lru_width|word_embed_proj_dim|d_latents|visual_feat_dim", HIDDEN),
    (r"image_size", IMAGE),
    (r"num_mel_bins|feature_size", 16),
    (r"(.*_)?d_state|state_size|ssm_state_size|index_topk|chunk_size", 16),
    (r"local_attention|sliding_window", 8),
]
BLOCKS = r"depths?|stage_num_blocks|stage_numb_of_layers|blocks_per_stage|num_stage_blocks"  # how many, of each stage
TOKENS = r".*token_(id|index)s?|im_\w+_id|codec_\w+_id|(\w+_)?(pad|patch)_id"


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, and the class of it that is tried."""

    model_type: str
    task: str
    class_name: str


def architectures() -> dict[str, Architecture]:
    """All that transformers' auto mappings know, by model type."""
    found: dict[str, Architecture] = {}
    for task, mapping in TASKS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            if model_type in CONFIG_MAPPING:
                found.setdefault(model_type, Architecture(model_type, task, name))
    return dict(sorted(found.items()))


def tiny_configurations(model_type: str) -> Iterator[PretrainedConfig]:
    """The configurations to try, the smallest first: all sizes made small, or only how many there are of something."""
    for patterns in (COUNTS + SIZES, COUNTS):
        yield Shrinker(patterns).smaller(CONFIG_MAPPING[model_type]())


class Shrinker:
    """Makes configurations small by patterns of their attributes' names, the same way in all that are in one."""

    def __init__(self, patterns: list[tuple[str, int]]):
        self._patterns = patterns
        self._tokens: dict[str, int] = {}

    def smaller(self, config: PretrainedConfig) -> PretrainedConfig:
        """One of the same class, whose other attributes follow from those that changed."""
        layers = _chosen_layers(config)
        changes: dict[str, Any] = {}
        for name, value in vars(config).items():
            if name.startswith("_"):
                continue
            if isinstance(value, (list, tuple)) and len(layers) and len(value) == config.num_hidden_layers:
                changes[name] = type(value)(value[index] for index in layers)
            elif name == "num_hidden_layers" and layers:
                changes[name] = len(layers)
            elif (new := self._smaller_value(name, value)) is not value:
                changes[name] = new
        heads = vars(config).get("num_attention_heads")
        if heads is not None and vars(config).get("num_key_value_heads") == heads:
            changes["num_key_value_heads"] = changes.get("num_attention_heads", heads)
        return type(config)(**{**changes, **CONSTRAINTS.get(config.model_type, {})})

    def _smaller_value(self, name: str, value: Any) -> Any:
        if isinstance(value, PretrainedConfig):
            return self.smaller(value)
        if name.startswith("rope_") and isinstance(value, dict):
            return _smaller_rope(value)
        if re.fullmatch(TOKENS, name):
            return self._smaller_token(name, value)
        if re.fullmatch(BLOCKS, name) and isinstance(value, (list, tuple)):
            return type(value)(min(each, 1) for each in value)
        if name == "image_size" and isinstance(value, (list, tuple)):
            return type(value)(min(each, IMAGE) for each in value)
        if name == "vocab_size" and isinstance(value, int):
            return VOCABULARY
        if isinstance(value, int) and not isinstance(value, bool):
            return min(value, next((size for pattern, size in self._patterns if re.fullmatch(pattern, name)), value))
        return value

    def _smaller_token(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._smaller_token(f"{name}{index}", each) for index, each in enumerate(value))
        if not isinstance(value, int) or (value < FIRST_SPECIAL and not re.search("image|video|audio|vision", name)):
            return value
        for kind, token in (("pad", 0), ("bos", 1), ("eos", 2)):
            if name == f"{kind}_token_id":
                return token
        return self._tokens.setdefault(name, FIRST_SPECIAL + len(self._tokens) % (VOCABULARY - FIRST_SPECIAL))


def _chosen_layers(config: PretrainedConfig) -> list[int]:
    """The first layer of each kind, where there are several kinds; otherwise none."""
    count = getattr(config, "num_hidden_layers", None)
    kinds = [
        value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(each, str) for each in value)
    ]
    if not kinds:
        return []
    chosen: list[int] = []
    seen: set[tuple[int, str]] = set()
    for index in range(len(kinds[0])):
        here = {(which, kind[index]) for which, kind in enumerate(kinds)}
        if here - seen or index < LAYERS:
            chosen.append(index)
            seen |= here
    return chosen


def _smaller_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings whose lists fit small heads, also where there are some for each kind of layer."""
    new = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, dict):
            new[name] = _smaller_rope(value)
        elif name == "mrope_section":
            half = int(HEAD * parameters.get("partial_rotary_factor", 1.0)) // 2
            new[name] = [half - 2 * (half // 3), half // 3, half // 3]
        elif name in ("short_factor", "long_factor"):
            new[name] = value[: HEAD // 2]
    return new
