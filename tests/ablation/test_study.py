"""The configurations of examples: each says what it is for, loads, and runs in small on the CPU."""

from pathlib import Path

import pytest
from ablation_testing import LEAST, run

from recompute.ablation.ablation_config import AblationConfig, HuggingFaceFields
from recompute.ablation.peers import COMPILED, EXACT_PEERS, is_peer
from recompute.ablation.subjects import model_source
from recompute.estimation.llama import ModelShape
from recompute.policy.document import load_document
from recompute.policy.loading import load_policy

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ablation"
FILES = {
    str(path.relative_to(EXAMPLES)): path for path in sorted(EXAMPLES.rglob("*.yaml")) if "results" not in path.parts
}
IN_PROCESSES = {"study/cpu.yaml", "study/longest-sequence.yaml"}
"""What takes long goes on after a crash or a lack of memory."""
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2,
}  # fmt: skip
LARGE_BY_DEFAULT = {
    "gpt2": ("n_embd", "n_layer", "n_head", "vocab_size"),
    "falcon": ("hidden_size", "num_attention_heads", "vocab_size"),
    "gemma2": (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    ),
    "olmo2": ("num_attention_heads", "num_key_value_heads", "vocab_size"),
}


def loaded(name):
    return load_document(AblationConfig, FILES[name], kind="configuration")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Policies' paths are those from the root."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", FILES)
def test_each_configuration_says_what_it_is_for_and_can_be_run(name):
    comment = [line for line in FILES[name].read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    assert ("?" if name.startswith("study/") else ".") in " ".join(comment)
    config = loaded(name)
    assert config.isolate is (config.cell_timeout_seconds is not None) is (name in IN_PROCESSES)
    for policy in config.treatments():
        assert is_peer(policy) or load_policy(policy.removesuffix(COMPILED)).rules is not None
    for comparison in config.comparisons():
        source = comparison.source
        if not isinstance(source, ModelShape):
            read = model_source(comparison)
            given = source.model_dump() if isinstance(source, HuggingFaceFields) else {}
            assert {key: getattr(read, key) for key in given} == given, "transformers knows every field"


def small(source):
    if isinstance(source, ModelShape):
        return LEAST.model
    assert isinstance(source, HuggingFaceFields)
    fields = source.model_dump()
    fields = dict.fromkeys(LARGE_BY_DEFAULT.get(fields["model_type"], ())) | fields
    sizes = dict(SMALL)
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):  # some models want as many
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return HuggingFaceFields(**{key: sizes.get(key, value) for key, value in fields.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_configuration_runs_in_small(name, tmp_path):
    config = loaded(name)
    search = config.longest_sequence and config.longest_sequence.model_copy(
        update={"budget": "2MiB", "start": 16, "multiple": 8, "most": 128}
    )
    changes = {
        "model": small(config.model),
        "compile": False,  # which takes a compiler's minutes
        "models": {name: small(source) for name, source in config.models.items()},
        "peers": tuple(peer for peer in config.peers if peer in EXACT_PEERS and peer.startswith("torch-")),
        "sequence_lengths": (16,),
        "longest_sequence": search,
        **{"steps": 2, "warmup": 0, "repeats": 1, "isolate": False, "cell_timeout_seconds": None, "device": "cpu"},
    }
    config = config.model_copy(update=changes)
    rows = run(tmp_path, config)
    assert len(rows) == len(config.treatments()) * len(config.comparisons())
    for row in rows:
        assert row.error is None, row
        assert row.grads_match is not False, row
    if search:
        assert all(row.longest_sequence > 0 for row in rows)
