"""When memory runs out: the error stays what it was, and says who holds what and which rule would free how much."""

import re
import sys
from functools import partial
from unittest import TestCase

import pytest
import torch
from engine_testing import function_of, module_of, no_tensors
from tiers import slow
from tiny import HIDDEN, INTERMEDIATE, TOKENS, decoder, next_token_loss, token_ids, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.diagnostics.out_of_memory import explain_out_of_memory
from recompute.diagnostics.timeline import Timeline
from recompute.policy.loading import load_policy

MLPS = {"rules": [{"match": "layers.*.mlp", "action": "recompute"}]}
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


def run_out(*_):
    raise torch.OutOfMemoryError(MESSAGE)


def run_out_of_real_memory(module, args, output):
    if not isinstance(output, FakeTensor):
        run_out()


RunsOutInBackward = function_of(lambda x: x.clone(), run_out, saves=no_tensors)
logged = partial(TestCase().assertLogs, "recompute.diagnostics.out_of_memory", "ERROR")


def report_of(model, step):
    with (
        logged() as logs,
        pytest.raises(torch.OutOfMemoryError, match=re.escape(MESSAGE)) as raised,
        explain_out_of_memory(model),
    ):
        step()
    (record,) = logs.records
    report = record.getMessage()
    if sys.version_info >= (3, 11):
        assert report in raised.value.__notes__[0]
    return report


def forward_of(model):
    return partial(next_token_loss, model, token_ids())


def peak_of(model, policy):
    """Of a step, by what really lives."""
    with recompute.apply(model, policy):
        train(model, steps=2)
        ids = token_ids()
        with Timeline(model) as timeline:
            torch.autograd.backward(next_token_loss(model, ids))
    model.zero_grad()
    return timeline.peak_nbytes


@pytest.mark.parametrize(("policy", "helps"), slow((None, {"layers.*", "layers.*.mlp"}), (MLPS, {"layers.*"})))
def test_it_says_who_holds_what_and_what_each_rule_frees(policy, helps):
    model = decoder()
    if policy is not None:
        recompute.apply(model, policy)
    hook = model.layers[1].mlp.up_proj.register_forward_hook(run_out_of_real_memory)
    report = report_of(model, forward_of(model))
    hook.remove()
    assert "out of memory in the forward of layers.1.mlp.up_proj (Linear)" in report
    gate = 2 * TOKENS * INTERMEDIATE * 4
    assert re.search(rf"layers\.\*\.mlp\.gate_proj +2 +{gate / 1024:.1f} KiB", report)
    lines = re.findall(r'^- \{match: "(\S+)", action: (\w+)\} +([\d.]+) (B|KiB)$', report, re.MULTILINE)
    assert {glob for glob, *_ in lines} >= helps
    # What the report promises is what happens.
    rules = [rule.model_dump() for rule in load_policy(policy or "none").rules]
    if policy is not None:
        model = decoder()
    before = peak_of(model, {"name": "now", "rules": rules or "none"})
    for glob, action, number, unit in lines:
        extra = {"match": glob, "action": action}
        after = peak_of(model, {"name": "one more", "rules": [extra, *rules]})
        assert float(number) == pytest.approx((before - after) / (1024 if unit == "KiB" else 1), abs=0.06)
    freed = [float(number) * (1024 if unit == "KiB" else 1) for *_, number, unit in lines]
    assert freed == sorted(freed, reverse=True)


@pytest.mark.slow
def test_it_names_offloading_where_nothing_else_frees_as_much():
    """Of these layers there is nothing to run again: each holds its output alone, which the next one is given."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)))
    x = torch.ones(2048, 256)
    hook = model[5].register_forward_hook(run_out_of_real_memory)
    report = report_of(model, lambda: model(x))
    hook.remove()
    ((rule, freed),) = re.findall(r"^- \{match: \"\*\", (.*)\} +([\d.]+) MiB$", report, re.MULTILINE)
    assert rule == "action: recompute, offload: true"
    assert float(freed) > 10 * x.nbytes / (1 << 20)


def test_it_names_compression_where_that_frees_more_than_exact_regeneration():
    layers = (nn.Sequential(nn.Linear(104, 416), nn.SiLU(), nn.Linear(416, 104)) for _ in range(4))  # no thin GEMM
    model = nn.Sequential(*layers)
    x = torch.ones(1024, 104)
    hook = model[2].register_forward_hook(run_out_of_real_memory)
    report = report_of(model, lambda: model(x))
    hook.remove()
    lines = re.findall(r'^- \{match: "\*", action: recompute(.*)\}(?:  # (.*))? +([\d.]+) MiB$', report, re.MULTILINE)
    (compressed, note, saved), (exact, _, less) = lines
    assert (compressed, note.strip(), exact) == (", compress: true", "not exact", "")
    assert float(saved) > 1.4 * float(less)

    def peak(**options):
        rules = [{"match": "*", "action": "recompute", **options}]
        with recompute.apply(model, {"rules": rules} if options else "none", strict=False):
            for _ in range(2):
                model(x).sum().backward()
                model.zero_grad()
            with Timeline(model) as timeline:
                model(x).sum().backward()
        model.zero_grad()
        return timeline.peak_nbytes

    assert (peak() - peak(compress=True)) / 1024**2 == pytest.approx(float(saved), abs=0.06)


@pytest.mark.slow
def test_it_says_when_it_was_in_backward_or_in_the_optimizers_step():
    model = decoder()

    def backward():
        loss = RunsOutInBackward.apply(forward_of(model)())
        loss.backward()

    assert "out of memory in the backward" in report_of(model, backward)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(run_out)

    def step():
        forward_of(model)().backward()
        optimizer.step()

    report = report_of(model, step)
    assert "out of memory in the step of SGD" in report
    assert "gradients" in report


def test_the_batch_is_the_last_one_in_training():
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())

    def run():
        model(torch.ones(64, HIDDEN)).sum().backward()
        model(torch.ones(128, HIDDEN)).sum().backward()
        with torch.no_grad():
            model(torch.ones(999, HIDDEN))
        model.eval()(torch.ones(999, HIDDEN))
        run_out()

    report = report_of(model, run)
    assert "out of memory in the code outside of the model" in report
    assert re.search(rf"\* +1 +{128 * HIDDEN * 4 / 1024:.1f} KiB", report)


@pytest.mark.slow
def test_what_is_around_the_model_is_seen_through():
    model = decoder()
    hook = model.layers[0].register_forward_hook(run_out_of_real_memory)
    wrapped = nn.DataParallel(torch.compile(model, backend="eager", disable=True))
    report = report_of(wrapped, lambda: next_token_loss(wrapped, token_ids()))
    hook.remove()
    assert "out of memory in the forward of layers.0 (TinyDecoderLayer)" in report
    assert '- {match: "layers.*", action: checkpoint}' in report


@pytest.mark.parametrize("rules", ["none", [{"type": "Body", "action": "checkpoint"}]])
def test_keywords_and_positions_are_both_understood(rules):
    def scaled(self, x, by, *, cache=None, **others):
        assert cache is None
        assert others.keys() <= {"other"}
        return torch.tanh(self.linear(x) * by)

    model = module_of(scaled, linear=nn.Linear(HIDDEN, HIDDEN))
    recompute.apply(model, {"name": "one", "rules": rules})

    def run():
        model(torch.ones(8, HIDDEN), by=2.0, cache=None, other=1)
        run_out()

    assert "A step on this batch takes" in report_of(model, run)


def test_what_cannot_be_estimated_is_said():
    model = nn.Linear(2, 2)
    assert "the model has not run in training mode yet" in report_of(model, run_out)

    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    asking = Asks(2, 2)

    def run():
        asking(torch.ones(3, 2))
        run_out()

    assert "The step cannot be estimated: ModelError: " in report_of(asking, run)


@pytest.mark.gpu
def test_the_rule_that_frees_most_lets_a_device_that_ran_out_go_on():
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape)).bfloat16()
        ids = torch.randint(256, (1, 8192))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((0.6 * peak + 0.4 * before) / total)
    try:
        with logged() as logs, pytest.raises(torch.OutOfMemoryError), explain_out_of_memory(model):
            step()
        (report,) = (record.getMessage() for record in logs.records)
        assert re.search(r"out of memory in the (forward of model\.|backward)", report)
        estimated = re.search(r"takes up to ([\d.]+) GiB more", report)
        assert estimated is not None
        assert float(estimated[1]) * 2**30 == pytest.approx(peak - before, rel=0.05)
        rule = re.search(r'^- \{match: "(\S+)", action: (\w+)\} ', report, re.MULTILINE)
        assert rule is not None
        recompute.apply(model, {"name": "advised", "rules": [{"match": rule[1], "action": rule[2]}]})
        model.zero_grad()  # the failed step's
        torch.cuda.empty_cache()
        step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_other_errors_pass_and_the_hook_goes():
    model = decoder()
    with TestCase().assertNoLogs():
        with pytest.raises(ValueError, match="not memory"), explain_out_of_memory(model):
            raise ValueError("not memory")
        with explain_out_of_memory(model):
            train(model, steps=1)
    assert not model._forward_pre_hooks
