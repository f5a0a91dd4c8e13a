"""``stats()`` under kernels: the bytes that they hold for backward, and those that the modules' own code would."""

import models
import pytest
import torch
from models import BATCH, HIDDEN, LAYERS, LENGTH, VOCABULARY, held
from tiers import by_default, slow
from tiny import of_one_more, rule, rules
from torch import Tensor, nn

import recompute
from recompute.attach.explain import Stats
from recompute.counters import step_memory
from recompute.substitution import held_memory

TOKENS = BATCH * LENGTH
PARTS = ["*RMSNorm", "*MLP"]


def parts(via, **options):
    """A policy for norms and MLPs, wherever they are."""
    return rules(*(rule([name], "recompute", via=via, **options) for name in PARTS))


def step_of(model, name, **batch):
    given = {**models.batch(name), **batch}
    return lambda: model(**given, use_cache=False).loss


def counted(model, policy, run):
    """Of a run under the policy, after two from which a layer learns; and the bytes that autograd holds after it."""
    with recompute.apply(model, policy) as handle:
        for _ in range(2):
            run()
        stats = of_one_more(run, handle)
        return stats, held(model, run)


@pytest.mark.filterwarnings("ignore:.*governs no module")  # of Mixtral, which has no MLP, and of GPT-2
@pytest.mark.parametrize("dtype", by_default({"float32": torch.float32, "bfloat16": torch.bfloat16}, "bfloat16"))
@pytest.mark.parametrize("name", ["llama", "gemma2", *slow("qwen3", "gemma3", "phi3", "mixtral", "gpt2")])
def test_what_kernels_save_is_what_autograd_holds_less(name, dtype):
    model = models.make(name, dtype=dtype)
    run = step_of(model, name)
    plain = held(model, run)
    by_kernels, holds = counted(model, parts("kernel"), run)
    assert by_kernels.eager_nbytes - by_kernels.kept_nbytes == plain - holds > 0
    by_hooks, holds = counted(model, parts("hook"), run)
    assert by_hooks.eager_nbytes - by_hooks.kept_nbytes == plain - holds
    assert by_kernels.eager_nbytes == by_hooks.eager_nbytes  # what a tape sees, and a run without values
    assert by_kernels.frames == by_hooks.frames


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"rerun": "gemm"}], ids=["kernels alone", "on a tape"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_it_is_so_of_whole_layers(name, options):
    model = models.make(name)
    given = rules(*(rule([each], "recompute", via="kernel", **options) for each in ("*DecoderLayer", "*RMSNorm")))
    plain = held(model, step_of(model, name))
    stats, holds = counted(model, given, step_of(model, name))
    assert stats.eager_nbytes - stats.kept_nbytes == plain - holds > 0


def test_it_is_so_under_autocast_and_of_frozen_weights():
    model = models.make("llama")
    forward = step_of(model, "llama")

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return forward()

    for frozen in (False, True):
        for parameter in model.model.layers.parameters():
            parameter.requires_grad_(not frozen)
        plain = held(model, run)
        stats, holds = counted(model, parts("kernel"), run)
        assert stats.eager_nbytes - stats.kept_nbytes == plain - holds > 0


def test_bytes_of_other_lengths_are_known_without_another_dry_run(monkeypatch):
    model = models.make("llama")
    handle = recompute.apply(model, parts("kernel"))
    step_of(model, "llama")()
    before = handle.stats()
    monkeypatch.setattr(held_memory, "_dry_runs", lambda *_: pytest.fail("a dry run for each length"))
    ids = models.batch("llama")["input_ids"][:, : LENGTH // 2]
    after = of_one_more(step_of(model, "llama", input_ids=ids, labels=ids), handle)
    assert (2 * after.eager_nbytes, 2 * after.kept_nbytes) == (before.eager_nbytes, before.kept_nbytes)


def test_a_head_counts_the_logits_that_its_loss_goes_without():
    model = models.make("llama")
    given = rules({"match": "lm_head", "action": "recompute", "via": "kernel"})
    stats, _ = counted(model, given, step_of(model, "llama"))
    logits, hidden = TOKENS * VOCABULARY * 4, TOKENS * HIDDEN * 4
    assert stats.eager_nbytes == logits + hidden
    # So few are held whole until backward, as no more than a block of them is; and two numbers a token.
    assert stats.kept_nbytes == logits + hidden + 2 * TOKENS * 4
    assert stats.frames == 1


def test_a_head_holds_the_logits_that_its_rule_has_room_for():
    words = 20_480  # of which three blocks are made; the weight's gradient has room for none
    model = models.make("llama", vocab_size=words)
    run = step_of(model, "llama", **models.batch("llama", size=4 * BATCH))
    expected = torch.autograd.grad(run(), model.lm_head.weight)
    kept, measured = [], []
    for room in ({}, {"hold": "1GiB"}):
        with recompute.apply(model, rules(rule("head", "recompute", via="kernel", **room))) as handle:
            torch.testing.assert_close(torch.autograd.grad(run(), model.lm_head.weight), expected)
            kept.append(handle.stats().kept_nbytes)
            measured.append(step_memory(run, torch.device("cpu")).activation_bytes_held)
            assert ("with 1.00 GiB for logits" in handle.explain(wide=True)) is bool(room)
    logits = 4 * TOKENS * words * 4
    assert kept[1] - kept[0] == measured[1] - measured[0] == logits


def test_a_policy_that_runs_nothing_counts_nothing():
    model = models.make("llama")
    handle = recompute.apply(model, parts("kernel"))
    run = step_of(model, "llama")
    with torch.no_grad():
        run()
    assert handle.stats() == Stats()
    run().backward()
    stats = handle.stats()
    assert stats.frames == LAYERS * 3 + 1
    assert 0 < stats.kept_nbytes < stats.eager_nbytes


def test_a_dry_run_leaves_no_trace():
    """Neither in the modes and hooks around, nor in autocast's cache of weights."""
    model = models.make("llama")
    seen = []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    recompute.apply(model, parts("kernel"))
    held_memory._measurements.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        losses = [step_of(model, "llama")() for _ in range(2)]
    losses[0].backward()
    assert torch.equal(*losses)
    assert set(seen) <= {Tensor, nn.Parameter}
    assert held_memory._measurements
