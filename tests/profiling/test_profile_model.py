"""A profile says what steps cost, for regions that are rightly told apart, and leaves the model as it was."""

import itertools
import random
import re

import models
import pytest
import tiny
import torch
from engine_testing import module_of
from test_step_trace import peak_of
from tiers import slow
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import recompute
from recompute.errors import AlreadyAppliedError, ModelError, PolicyWarning
from recompute.profiling import measure_regions
from recompute.profiling.dry_run import DryRun, dry_run
from recompute.profiling.regions import policy_from_rules


def decoder_and_loss(layers=4, **options):
    ids = tiny.token_ids()

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return tiny.decoder(layers=layers, **options), ids, loss


def profiled(layers=4, **options):
    model, ids, loss = decoder_and_loss(layers)
    return recompute.profile(model, ids, loss=loss, steps=1, **options)


def predicted_peak(profile, choices):
    gradients = [profile.regions[place.region].gradient_nbytes for place in profile.places]
    return peak_of(choices, gradients, profile.optimizer_peak_nbytes)


def measured_peak(profile, model, batch, choices, loss=None):
    rules = {place.path: choice.rule for place, choice in zip(profile.places, choices, strict=True) if place.path}
    with dry_run(model, batch, loss=loss) as run, recompute.apply(model, policy_from_rules(rules)) as handle:
        regions = {place.path: model.get_submodule(place.path) for place in profile.places[1:-1]}
        run.settle(handle)
        return run.step(regions, counted=True).peak_nbytes


def choices_of(profile):
    return [profile.regions[place.region].choices for place in profile.places]


def named(profile, *names):
    return [
        next(choice for choice in choices if choice.name == name)
        for choices, name in zip(choices_of(profile), names, strict=True)
    ]


@pytest.mark.slow
def test_the_time_line_gives_the_peak_of_every_uniform_policy_to_the_byte():
    model, ids, loss = decoder_and_loss(6)
    profile = recompute.profile(model, ids, loss=loss, steps=1)
    layer = choices_of(profile)[1]
    assert [choice.name for choice in layer[:2]] == ["keep", "hook"]
    assert len(layer) > 5
    for choice in layer:
        choices = named(profile, "keep", *[choice.name] * 6, "keep")
        assert predicted_peak(profile, choices) == measured_peak(profile, model, ids, choices, loss)


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "H200"])
def test_ways_that_hold_8_bits_are_profiled_where_they_are_asked_for(device):
    sizes = {"hidden_size": 128, "intermediate_size": 192}  # of which no GEMM is thin
    model, batch = models.make("llama", use_cache=False, **sizes), models.batch("llama", size=4, length=64)
    options = {"steps": 1, "device": device, "kernels": False}
    exact = {choice.name: choice for choice in choices_of(recompute.profile(model, batch, **options))[1]}
    layer = {choice.name: choice for choice in choices_of(recompute.profile(model, batch, compress=True, **options))[1]}
    assert layer.keys() - exact.keys() == {"hook, in 8 bits"}
    assert layer["hook, in 8 bits"].held_nbytes < 0.9 * exact["hook"].held_nbytes
    rule = {"match": "model.layers.*", **(layer["hook, in 8 bits"].rule or {})}
    with recompute.apply(model, {"rules": [rule]}) as handle:
        model(**batch).loss.backward()
    assert "8 bits" in handle.explain(wide=True)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_the_time_line_gives_the_peak_of_mixed_policies(kernels):
    model = models.make("llama", num_hidden_layers=5)
    model.config.use_cache = False
    batch = models.batch("llama")
    profile = recompute.profile(model, batch, steps=1, kernels=kernels)
    generator = random.Random(0)
    for _ in range(4):
        choices = [generator.choice(ways) for ways in choices_of(profile)]
        peak = measured_peak(profile, model, batch, choices)
        # Where ways meet, what is at the border may be alive twice, or once where each alone would hold it.
        state_nbytes = batch["input_ids"].numel() * model.config.hidden_size * 4
        assert abs(predicted_peak(profile, choices) - peak) <= state_nbytes + 0.002 * peak


@pytest.mark.slow
def test_tied_embeddings_take_the_room_that_the_way_of_the_head_leaves_them():
    """Autograd adds up both gradients of the weight beside them, unless a kernel has made the head's."""
    model = models.make("llama", num_hidden_layers=2, vocab_size=8192, tie_word_embeddings=True, use_cache=False)
    batch = models.batch("llama", size=1, length=8)
    profile = recompute.profile(model, batch, steps=1, kernels=True)
    weight_nbytes = model.lm_head.weight.nbytes
    assert choices_of(profile)[0][0].backward_peak_nbytes < 1.1 * weight_nbytes  # the embedding's own gradient
    as_it_is = named(profile, "keep", "keep", "keep", "keep")
    peak = measured_peak(profile, model, batch, as_it_is)
    assert peak > 3 * weight_nbytes
    assert 0 <= predicted_peak(profile, as_it_is) - peak < 0.05 * weight_nbytes


def test_regions_that_run_alike_are_one():
    profile = profiled(2, match="layers.*.mlp")
    assert profile.model.endswith(f"; {'x'.join(map(str, tiny.token_ids().shape))}")  # a batch without names
    assert [place.path for place in profile.places] == ["", "layers.0.mlp", "layers.1.mlp", ""]
    assert [place.region for place in profile.places] == [0, 1, 1, 2]
    assert [region.name for region in profile.regions] == [
        "TinyDecoder: before the first region",
        "TinyMLP",
        "TinyDecoder: head and loss",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wider", "frozen", "bias"])
def test_a_region_that_runs_otherwise_is_told_apart(how):
    model, ids, loss = decoder_and_loss()
    layer = model.layers[2]
    if how == "wider":
        layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(tiny.HIDDEN, 32, bias=False) for _ in range(2))
        layer.mlp.down_proj = nn.Linear(32, tiny.HIDDEN, bias=False)
    elif how == "frozen":
        layer.mlp.requires_grad_(False)
    else:
        layer.mlp.down_proj = nn.Linear(tiny.INTERMEDIATE, tiny.HIDDEN)
    profile = recompute.profile(model, ids, loss=loss, steps=1)
    assert [place.region for place in profile.places] == [0, 1, 1, 2, 1, 3]
    plain, other = (profile.regions[number].gradient_nbytes for number in (1, 2))
    assert (other < plain) if how == "frozen" else (other > plain)


@pytest.mark.slow
def test_layers_that_alternate_are_told_apart():
    kinds = ["sliding_attention", "full_attention"] * 2
    model = models.make("gemma3", num_hidden_layers=4, layer_types=kinds, sliding_window=8)
    profile = recompute.profile(model, models.batch("gemma3"), steps=1)
    assert [place.region for place in profile.places] == [0, 1, 2, 1, 2, 3]


@pytest.mark.slow
def test_every_choice_is_unique_and_the_rule_of_a_policy():
    profile = profiled(kernels=True)
    for region in profile.regions:
        names = [choice.name for choice in region.choices]
        assert len(set(names)) == len(names)
        assert names[0] == "keep"
        for choice in region.choices[1:]:
            assert choice.rule is not None
            recompute.Rule(match="any", **choice.rule)
    layer, head = ({choice.name: choice for choice in region.choices} for region in profile.regions[1:])
    assert layer["checkpoint"].held_nbytes < layer["hook"].held_nbytes < layer["keep"].held_nbytes
    assert layer["kernel"].held_nbytes < layer["keep"].held_nbytes
    assert head.keys() == {"keep", "kernel"}
    assert profile.places[-1].path == "lm_head"
    assert profile.places[-1].also == ("norm",)  # which the presets govern, too
    assert profile.source == "measured"
    assert profile.capacity_nbytes is None


class LinearWithBias(nn.Linear):
    """Returns its bias beside its output, as Megatron's do."""

    def forward(self, x):  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


def test_a_linear_that_returns_more_than_a_tensor_is_no_head():
    model = module_of(
        lambda self, x: sum(self.head(self.layers(x))),
        layers=nn.Sequential(nn.Tanh(), nn.Tanh()),
        head=LinearWithBias(4, 5),
    )
    profile = recompute.profile(model, torch.ones(1, 4), match="layers.*", steps=1)
    assert [choice.name for choice in profile.regions[-1].choices] == ["keep"]
    assert profile.places[-1].path == ""


@pytest.mark.slow
def test_static_bytes_are_parameters_states_and_batch():
    model, ids, _ = decoder_and_loss(2)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))  # AdamW counts each parameter's
    assert profiled(2).static_nbytes == 3 * weights + steps + ids.nbytes
    assert profiled(2, optimizer=lambda given: SGD(given, lr=1.0)).static_nbytes == weights + ids.nbytes


def test_what_a_microbatch_has_of_its_own_is_its_batch_and_its_outputs_gradients():
    """Of a pipeline's last stage the logits are held by the caller alone; any other's output gets a gradient."""
    model, ids, loss = decoder_and_loss(2)
    logits = model(ids).nbytes
    for of_last, own, output in ((loss, ids.nbytes, logits), (None, ids.nbytes + logits, 0)):
        with dry_run(model, ids, loss=of_last) as run:
            before = run.static_nbytes
            run.forward()
            assert (run.microbatch_nbytes, run.output_nbytes) == (own, output)
            assert run.static_nbytes - before == own - ids.nbytes
        with dry_run(model, ids, loss=of_last, microbatches=4, microbatches_in_flight=3) as several:
            several.forward()
            assert several.static_nbytes == run.static_nbytes + 4 * own + 3 * output


def test_a_step_of_several_microbatches_is_that_of_one_beside_the_others():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    x = torch.randn(64, 8, requires_grad=True)
    steps = []
    for several in ({}, {"microbatches": 4, "microbatches_in_flight": 3}):
        with dry_run(module, x, optimizer=lambda given: SGD(given, lr=1.0), **several) as run:
            for _ in range(2):
                run.step({"1": module[1]})
            steps.append(run.step({"1": module[1]}, counted=True))
            assert run.args[0].grad is None
    one, last = steps
    assert [part.held_nbytes for part in one.parts] == [part.held_nbytes for part in last.parts]
    assert [part.forward_peak_nbytes for part in one.parts] == [part.forward_peak_nbytes for part in last.parts]
    weights = sum(parameter.nbytes for parameter in module.parameters())
    held = sum(part.held_nbytes for part in one.parts)
    assert one.peak_nbytes + 2 * held <= last.peak_nbytes <= one.peak_nbytes + 2 * held + weights
    assert sum(part.gradient_nbytes for part in last.parts) == x.nbytes  # those of parameters were there before
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


def state_of(model):
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    return tensors, [parameter.grad for parameter in model.parameters()], torch.get_rng_state(), tiny.snapshot(model)


def assert_same_state(found, expected):
    assert found[3] == expected[3]
    assert all(one is other for one, other in zip(found[1], expected[1], strict=True))
    assert torch.equal(found[2], expected[2])
    for name, (tensor, copy) in found[0].items():
        assert tensor is expected[0][name][0]
        assert torch.equal(copy, expected[0][name][1])


@pytest.mark.parametrize("fails_at", [None, 1, 4, 12])
def test_the_model_is_afterwards_what_it_was(fails_at):
    model, ids, loss = decoder_and_loss(1, dropout=0.1)
    model.eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = state_of(model)
    calls = itertools.count(1)

    def failing(logits):
        if next(calls) == fails_at:
            raise LookupError("out of ideas")
        return loss(logits)

    def fast(parameters):
        return AdamW(parameters, lr=1.0, weight_decay=1.0)

    options = {"loss": failing, "optimizer": fast, "match": "layers.*.mlp", "steps": 1}
    if fails_at is None:
        recompute.profile(model, ids, **options)
    else:
        with pytest.raises(LookupError, match="out of ideas"):
            recompute.profile(model, ids, **options)
    assert_same_state(state_of(model), before)


@pytest.mark.slow
def test_gradients_that_are_no_numbers_change_no_weight():
    model, ids, _ = decoder_and_loss(2)
    before = state_of(model)
    recompute.profile(model, ids, loss=lambda logits: (logits * torch.inf).sum(), steps=1)
    assert_same_state(state_of(model), before)


@pytest.mark.parametrize(("slow_seconds", "steps"), [(-1.0, 1 + 1 + 1), *slow((float("inf"), 1 + 1 + 2 * 3))])
def test_fewer_steps_run_where_they_are_long_and_progress_counts_assignments(monkeypatch, slow_seconds, steps):
    monkeypatch.setattr(measure_regions, "SLOW_SECONDS", slow_seconds)
    ran = []
    step = DryRun.step
    monkeypatch.setattr(DryRun, "step", lambda run, *given, **more: ran.append(run) or step(run, *given, **more))
    told = []
    model, ids, loss = decoder_and_loss(1)
    recompute.profile(model, ids, loss=loss, match="layers.*.mlp", steps=3, progress=lambda *now: told.append(now))
    jobs = [now[1:] for now in told if now[0] == "ways to run the regions"]
    assert jobs == [(done, len(jobs)) for done in range(len(jobs))]
    assert len(jobs) > 1
    assert len(ran) == (1 + len(jobs)) * steps


def test_short_steps_are_measured_as_captured_code(monkeypatch):
    monkeypatch.setattr(measure_regions, "SLOW_SECONDS", float("inf"))
    handles = []
    monkeypatch.setattr(measure_regions, "apply", lambda *given: handles.append(recompute.apply(*given)) or handles[-1])
    told = {}
    step = DryRun.step

    def watched(run, regions, **more):
        trace = step(run, regions, **more)
        if handles:
            said = re.findall(r"\d+ of \d+ run as captured code", str(handles[-1].explain(wide=True)))
            told.setdefault(len(handles), []).append(said)
        return trace

    monkeypatch.setattr(DryRun, "step", watched)
    model, ids, loss = decoder_and_loss(2)
    recompute.profile(model, ids, loss=loss, match="layers.*.mlp", steps=2)
    timed = [said for steps in told.values() for said in steps[-4:]]  # with marks and without
    assert all(said in ([], ["2 of 2 run as captured code"]) for said in timed)
    assert ["2 of 2 run as captured code"] in timed


@pytest.mark.slow
def test_what_does_not_fit_is_left_out(monkeypatch):
    measure = measure_regions._RegionMeasurer._measure

    def with_little_memory(self, job):
        if any(slot.candidate.name == "keep" and len(slot.places) > 1 for slot in job):
            raise torch.OutOfMemoryError("no room")
        measure(self, job)

    monkeypatch.setattr(measure_regions._RegionMeasurer, "_measure", with_little_memory)
    with pytest.warns(PolicyWarning, match="for TinyDecoderLayer, keep is left out, because it failed: no room"):
        profile = profiled(5)
    names = [choice.name for choice in profile.regions[1].choices]
    assert "keep" not in names
    assert {"hook", "checkpoint"} <= set(names)


def test_where_nothing_fits_it_says_so():
    model, ids, _ = decoder_and_loss(2)

    def loss(logits):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(ModelError, match="does not fit the device, even under the leanest policy"):
        recompute.profile(model, ids, loss=loss, steps=1)


@pytest.mark.slow
def test_a_layer_that_runs_twice_is_part_of_what_is_around_it():
    model = module_of(
        lambda self, x: self.once(self.twice(self.twice(x))),
        twice=tiny.TinyDecoderLayer(),
        once=tiny.TinyDecoderLayer(),
    )
    with pytest.warns(PolicyWarning, match="twice runs 2 times in a forward"):
        profile = recompute.profile(model, torch.ones(2, 6, tiny.HIDDEN), steps=1)
    assert [place.path for place in profile.places] == ["", "once", ""]
    assert profile.regions[0].choices[0].held_nbytes > 0


def test_bad_input_is_named():
    model, ids, loss = decoder_and_loss(2)
    with pytest.raises(ModelError, match=r"no module inside of it matches 'blocks.\*'"):
        recompute.profile(model, ids, loss=loss, match="blocks.*")
    with pytest.raises(ModelError, match=r"expected regions .* recompute\.profile\(model, batch, match="):
        recompute.profile(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="at least 1 step"):
        recompute.profile(model, ids, loss=loss, steps=0)
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got function"):
        recompute.profile(loss, ids)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="none of TinyDecoder's parameters requires a gradient"):
        recompute.profile(model.requires_grad_(False), ids, loss=loss)
    model.requires_grad_(True)
    with recompute.apply(model), pytest.raises(AlreadyAppliedError, match="already under a policy"):
        recompute.profile(model, ids, loss=loss)
