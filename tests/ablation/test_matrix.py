"""A configuration of several models, batch sizes, dtypes and lengths: what it runs, and what it refuses."""

import json

import pytest
import torch
from ablation_testing import TINY, quiet, run
from transformers import LlamaConfig

from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.subjects import experiment_of
from recompute.errors import AblationError, ModelError, PolicyError
from recompute.estimation.static_memory import DTYPE_RECIPES, OPTIMIZERS, ParameterShape, static_nbytes
from recompute.policy.document import parse_document

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 8}
MATRIX = """
models:
  tiny: {hidden_size: 64, intermediate_size: 172, layers: 2, heads: 4, kv_heads: 2}
  gpt2: {model_type: gpt2, n_layer: 1, n_embd: 32, n_head: 2, vocab_size: 300, n_positions: 8}
  own: its_own_model:make
policies: [none, elementwise]
peers: []
sequence_lengths: [16, 8]
batch_sizes: [1, 2]
dtypes: [float32, autocast]
steps: 2
warmup: 0
device: cpu
"""


def configured(text=MATRIX, **changes):
    return parse_document(AblationConfig, text, label="c.yaml").model_copy(update=changes)


def test_each_model_meets_each_size_and_a_factory_has_its_own():
    found = [tuple(each.facts.values()) for each in configured().comparisons()]
    sizes = [(length, batch, dtype) for batch in (1, 2) for dtype in ("float32", "autocast") for length in (16, 8)]
    expected = [(model, *size) for model in ("tiny", "gpt2") for size in sizes]
    assert found == [*expected, ("own", None, None, "float32"), ("own", None, None, "autocast")]
    of_one = [tuple(each.facts.values()) for each in AblationConfig(sequence_lengths=(8, 16)).comparisons()]
    assert of_one == [("llama", 8, 4, "float32"), ("llama", 16, 4, "float32")]


@pytest.mark.parametrize("key", ["models: {a: b.c:d, e: f:g}", "batch_sizes: [1, 2]", "sequence_lengths: [4, 8]"])
def test_a_script_for_one_model_refuses_several(key):
    assert configured("steps: 3\n").single().config.steps == 3
    with pytest.raises(AblationError, match="one model, one sequence length, one batch size and one dtype"):
        configured(f"{key}\n").single()


def test_a_matrix_trains_llamas_hugging_face_models_and_factories_in_each_dtype(own):
    rows = run(own / "out", configured(sequence_lengths=(16,), batch_sizes=(2,)))
    assert [(row.model, row.dtype, row.policy) for row in rows] == [
        (model, dtype, policy)
        for model in ("tiny", "gpt2", "own")
        for dtype in ("float32", "autocast")
        for policy in ("none", "elementwise")
    ]
    assert all(row.error is None and row.losses_match and row.grads_match for row in rows), rows
    none, elementwise = (
        {(row.model, row.dtype): row for row in rows if row.policy == policy} for policy in ("none", "elementwise")
    )
    for key, row in elementwise.items():
        assert row.activation_bytes_held < none[key].activation_bytes_held
    for model in ("tiny", "gpt2", "own"):  # bfloat16 products of float32 weights: other losses, near to them
        exact, rounded = (none[model, dtype].losses or () for dtype in ("float32", "autocast"))
        assert exact != rounded == pytest.approx(exact, rel=2e-2)
        assert none[model, "float32"].parameter_bytes == none[model, "autocast"].parameter_bytes


def test_a_model_is_a_folder_or_a_config_json_too(own):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=100, max_position_embeddings=4, **shape).save_pretrained(own / "saved")
    text = MATRIX.replace("own: its_own_model:make", "folder: saved\n  file: saved/config.json")
    config = configured(text, sequence_lengths=(8,), batch_sizes=(1,), dtypes=(), policies=())
    folder, file = [row for row in run(own / "out", config) if row.model in ("folder", "file")]
    assert folder.error is file.error is None
    assert folder.losses == file.losses
    assert folder.parameter_bytes == file.parameter_bytes


def test_adapters_alone_train_and_peers_govern_the_layers_that_they_are_in(own):
    lora = "lora: {r: 4, lora_dropout: 0.1, target_modules: [q_proj, c_attn]}"
    one_model = MATRIX.replace("  own: its_own_model:make\n", "")
    changes = {"sequence_lengths": (8,), "batch_sizes": (1,), "dtypes": ("bfloat16",)}
    rows = run(own / "out", configured(one_model + lora, peers=("torch-checkpoint",), **changes))
    held = {(row.model, row.policy): row.activation_bytes_held or 0 for row in rows}
    for row in rows:
        assert row.error is None
        assert (row.exact, row.losses_match, row.grads_match) == (True, True, True)
        assert 0 < 2 * row.gradient_bytes < row.parameter_bytes, "the base is frozen"
        assert row.logits_bytes_held
        assert row.policy == "none" or held[row.model, row.policy] < held[row.model, "none"]


def test_logits_are_what_head_and_loss_hold(own):
    """A larger vocabulary holds more of these, and as much of all else."""
    models = {size: {**GPT2, "vocab_size": size} for size in (300, 600)}
    text = f"models: {{a: {json.dumps(models[300])}, b: {json.dumps(models[600])}}}"
    base = MATRIX[MATRIX.index("policies") :]
    config = configured(text + "\n" + base, sequence_lengths=(8,), batch_sizes=(2,), dtypes=(), policies=())
    small, large = run(own / "out", config)
    held = [row.activation_bytes_held - row.logits_bytes_held for row in (small, large)]
    assert held[0] == held[1] > 0
    # Of 7 positions in each of 2 sequences, cross-entropy holds log-probabilities in float32.
    assert large.logits_bytes_held - small.logits_bytes_held >= 2 * 7 * 300 * 4


def test_static_memory_is_that_of_the_account(own):
    config = configured(models={"tiny": TINY.model}, sequence_lengths=(8,), batch_sizes=(1,), dtypes=())
    experiment = experiment_of(config.comparisons()[0], bytes(2048), torch.device("cpu"), quiet)
    row = experiment.row("none")
    shapes = [ParameterShape(tuple(each.shape)) for each in experiment.make().parameters()]
    expected = static_nbytes(shapes, recipe=DTYPE_RECIPES["float32"], optimizer=OPTIMIZERS["adamw-fused"])
    assert (row.parameter_bytes, row.gradient_bytes) == (expected.parameters, expected.gradients)
    assert row.optimizer_bytes == expected.optimizer + 4 * len(shapes)  # and how many steps it took, for each


WRONG = [
    ("stpes: 3", r"c\.yaml:1:1: stpes: unknown key \(did you mean 'steps'\?\)"),
    ("seed: 1\nsteps: many", r"c\.yaml:2:8: steps: expected an integer; found 'many'"),
    ("steps: 0", r"c\.yaml:1:8: steps: expected .*greater than 0"),
    ("sequence_lengths: []", r"c\.yaml:1:19: sequence_lengths: .*at least 1 item"),
    ("dtype: float16", r"c\.yaml:1:8: dtype: .*float32.*bfloat16"),
    ("peers: [torch-chekpoint]", r"c\.yaml:1:9: peers\[0\]: .*torch-checkpoint"),
    ("model:\n  heads: 3", r"c\.yaml:2:3: model: expected hidden_size to be a multiple of 2 \* heads = 6"),
    ("model:\n  kv_heads: 3", r"c\.yaml:2:3: model: expected heads to be a multiple of kv_heads = 3"),
    ("models:\n  a: {hidden_sise: 3}",
        r"c\.yaml:2:7: models\.a\.hidden_sise: unknown key \(did you mean 'hidden_size'"),
    ("models:\n  a: {heads: 3}", r"c\.yaml:2:6: models\.a: expected hidden_size to be a multiple"),
    ("models:\n  a: {model_type: 3}", r"c\.yaml:2:19: models\.a\.model_type: expected a string"),
    ("models:\n  a: 3", r"c\.yaml:2:6: models\.a: expected a mapping"),
    ("lora: {r: 4, lora_alfa: 8}",
        r"c\.yaml:1:25: lora\.lora_alfa: expected a field of PEFT's .* \(did you mean 'lora_alpha'\?\); found 8"),
    (f"{MATRIX}batch_size: 2", "batch_size or batch_sizes; found both"),
    (f"{MATRIX}dtype: float32", "dtype or dtypes; found both"),
    (f"{MATRIX}model: {{layers: 2}}", "model or models; found both"),
    (f"{MATRIX}cell_timeout_seconds: 60", "cell_timeout_seconds needs isolate: true"),
    (f"{MATRIX}repeats: 0", r"c\.yaml:\d+:10: repeats: expected .*greater than 0"),
    (f"{MATRIX}longest_sequence: {{budget: device}}", "budget device needs isolate: true"),
    (f"{MATRIX}longest_sequence: {{budget: 3 GiBs}}", "longest_sequence: budget: a budget of '3 GiBs' cannot be read"),
    (f"{MATRIX}longest_sequence: {{budget: 3GiB}}",
        "longest_sequence: expected models of transformers; found models.own"),
    (f"{MATRIX}step: layers",
        "step: layers: expected models of transformers; found models.own, the factory its_own_mod"),
    (f"{MATRIX}lora: {{r: 4}}", "lora: expected models of transformers; found models.own, the factory its_own_mod"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_mistake_is_told_with_file_line_and_key(text, message):
    with pytest.raises(PolicyError, match=message):
        configured(f"{text}\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./gone",
            r"models\.wrong: \./gone: there is no such file or folder; .*:factory; or a mapping with a model_type"),
        ("nowhere:make", "nowhere:make: there is no module nowhere"),
        ("{model_type: gpt2, n_embed: 8}",
            r"models\.wrong\.n_embed: GPT2Config has no such field \(did you mean 'n_embd'\?\)"),
        ("{model_type: llama, hidden_size: 8, num_attention_heads: 3}",
            r"models\.wrong: .* cannot build a model .*hidden size \(8\) is not a multiple"),
        ("{model_type: lama}", r"models\.wrong: transformers .* cannot build a model .*lama"),
    ],
)  # fmt: skip
def test_a_model_that_there_is_not_is_told_before_anything_is_trained(tmp_path, model, message):
    with pytest.raises(ModelError, match=message):
        run(tmp_path / "out", configured(f"models:\n  wrong: {model}\n"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_made_fails_its_rows_alone(own):
    broken = {**GPT2, "n_head": 5}
    text = MATRIX.replace("own: its_own_model:make", f"broken: {json.dumps(broken)}")
    config = configured(text, sequence_lengths=(8,), batch_sizes=(1,), dtypes=(), policies=())
    errors = {row.model: row.error for row in run(own / "out", config)}
    assert errors["tiny"] is errors["gpt2"] is None
    assert "cannot build a model" in errors["broken"]
