"""What a rule says of kernels beside where they run: codes of 8 bits, and tiles of tokens."""

import gc
import weakref

import pytest
import torch
from layer_testing import causal
from models import INTERMEDIATE, LAYERS, SHAPE, make
from models import batch as batch_of
from peft import LoraConfig, get_peft_model
from tiers import by_default, slow

import recompute
from recompute.counters import step_memory
from recompute.diagnostics.comparing_runs import COMPRESSION_TOLERANCE

CODES = {"compress": True}
TILES = {"tile": 32}
LONG = {"rerun": "gemm", "price": 0, "tile": 32, "offload": True, "min_bytes": 0}


def rules(**more):
    keep = {} if "rerun" in more else {"keep": "gemm"}  # of which some are thin in a model this small
    return {"rules": [{"type": "block", "action": "recompute", "via": "kernel", **keep, **more}]}


@pytest.mark.parametrize("family", by_default(["llama", "gemma", "phi3", "qwen3", "mistral", "gpt2"], "llama"))
@pytest.mark.parametrize("settings", by_default({"codes": CODES, "tiles": TILES, "long": LONG}, "long"))
def test_layers_compute_the_same(family, settings):
    model, batch = make(family), batch_of(family, length=64, size=2)
    found = recompute.verify(model, batch, policy=rules(**settings))
    if settings is CODES:
        assert found.compressed_tensors > 0
        assert 0 < found.relative_error <= COMPRESSION_TOLERANCE
    else:
        assert found.relative_error < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "note"),
    [
        ("llama", CODES, "gated_mlp (silu), gate and up in 8 bits"),
        *slow(("llama", TILES, "gated_mlp (silu), 32 tokens at a time")),
        ("gpt2", CODES, "mlp (gelu_tanh), what c_fc gives in 8 bits"),
    ],
)
def test_explain_says_what_kernels_are_told(family, settings, note):
    with recompute.apply(make(family), rules(**settings)) as handle:
        assert f"kernel: {note}" in handle.explain(wide=True)


def adapted(dropout=0.0, **more):
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", **more)
    return get_peft_model(make("llama"), config)


@pytest.mark.parametrize("dropout", [*slow(0.0), 0.1])
def test_mlps_with_adapters_compute_the_same_in_tiles(dropout):
    """Adapters that drop run on all tokens at once, and are captured: tiles would draw other numbers."""
    model = adapted(dropout)
    found = recompute.verify(model, batch_of("llama", length=64, size=2), policy=rules(**LONG))
    assert found.relative_error < 1e-5
    told = "all tokens at once, as its adapters drop" if dropout else "32 tokens at a time"
    with recompute.apply(model, rules(**LONG)) as handle:
        assert f"an MLP with adapters, {told}" in handle.explain(wide=True)


def test_a_model_with_adapters_dies_after_it_ran_in_tiles():
    model, batch = adapted(), batch_of("llama", length=64, size=2)
    with recompute.apply(model, rules(**TILES)):
        model(**batch).loss.backward()
    weights = [weakref.ref(each) for each in model.parameters()]
    del model
    gc.collect()
    assert [each for each in weights if each() is not None] == []


@pytest.mark.parametrize("make", by_default({"plain": lambda: make("llama"), "adapted": adapted}, "plain"))
def test_tiles_hold_less_and_their_peak_is_lower(make):
    model, batch = make(), batch_of("llama", length=256, size=2)

    def measured(**settings):
        with recompute.apply(model, rules(**settings)):
            for _ in range(2):
                model(**batch).loss.backward()
            return step_memory(lambda: model(**batch).loss, torch.device("cpu"))

    whole, tiled = measured(), measured(**TILES)
    assert tiled.activation_bytes_held < 0.8 * whole.activation_bytes_held
    assert tiled.peak_bytes < whole.peak_bytes


CAPTURED, FINDS_NONE = f"{LAYERS} of {LAYERS} run as captured code", "this rule finds no MLP to run in tiles"


@pytest.mark.parametrize(
    ("make", "told", "not_told"),
    [
        (lambda: make("llama"), CAPTURED, FINDS_NONE),
        (adapted, "stay on the tape: no graph has the call that runs an MLP with adapters in tiles", FINDS_NONE),
        *slow((lambda: adapted(0.1), CAPTURED, FINDS_NONE)),
        *slow((lambda: adapted(use_dora=True), FINDS_NONE, "tokens at a time")),
    ],
    ids=["plain", "adapted", "adapted and dropping", "adapted by columns"],
)
def test_layers_in_tiles_go_on_as_captured_code_or_explain_says_why_not(make, told, not_told):
    model, batch = make(), batch_of("llama", length=64, size=2)
    with recompute.apply(model, rules(**LONG)) as handle:
        for _ in range(12):
            model(**batch).loss.backward()
        text = handle.explain(wide=True)
    assert told in text
    assert not_told not in text


@pytest.mark.parametrize(("settings", "held"), [*slow((TILES, 0)), (CODES, 1 + 4 / 128)], ids=["tiles", "codes"])
@pytest.mark.parametrize(
    ("family", "type_name"), [("llama", "block"), *slow(("llama", "*MLP"), ("starcoder2", "block"))]
)
def test_stats_count_what_is_held(family, type_name, settings, held):
    """held: bytes of each number of what the first Linears give."""
    torch.manual_seed(0)
    starcoder2 = causal("Starcoder2", **SHAPE, residual_dropout=0.0, embedding_dropout=0.0)
    model = make(family) if family == "llama" else starcoder2()
    batch = batch_of("llama", length=64, size=2)

    def kept(**settings):
        given = {"rules": [{**rules(**settings)["rules"][0], "type": type_name}]}
        with recompute.apply(model, given) as handle:
            for _ in range(2):
                before = handle.stats()
                model(**batch).loss.backward()
            by_stats = (handle.stats() - before).kept_nbytes
            return by_stats, step_memory(lambda: model(**batch).loss, torch.device("cpu")).activation_bytes_held

    numbers = LAYERS * 2 * 64 * INTERMEDIATE * (2 if family == "llama" else 1)
    for whole, less in zip(kept(), kept(**settings), strict=True):
        assert whole - less == pytest.approx((4 - held) * numbers, rel=0.02)
