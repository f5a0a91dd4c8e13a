"""What captured regions hold, for how long, and how they account for it and for the time that regenerating takes."""

import copy
import functools
import gc
import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from capture_testing import SIZE, STEPS_TO_SETTLE, Around, Layers, Twins, body, linear, rule, tokens, train
from engine_testing import GatedMLP, RMSNorm, assert_same, fresh, loss_of, no_garbage_collection, set_by
from tiers import one_in, slow
from tiny import of_one_more
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import recompute
from recompute.attach.runners import region_in
from recompute.compiled import captured_function, frontend
from recompute.compiled.codegen import Code
from recompute.counters import step_memory
from recompute.engine import region_statistics
from recompute.engine.cut.save_plan import LARGEST_COPY


def mlp():
    return nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))


@contextmanager
def watched():
    """References to all that frames keep of what they have made."""
    found = []
    run = captured_function.CapturedFrame.run

    def watch(frame, *inputs):
        outputs = run(frame, *inputs)
        found.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in frame._kept)
        return outputs

    with pytest.MonkeyPatch.context() as patch, no_garbage_collection():
        patch.setattr(captured_function.CapturedFrame, "run", watch)
        yield found


def frames_alive():
    kinds = captured_function.CapturedFrame, captured_function._Outputs
    return sum(isinstance(each, kinds) for each in gc.get_objects())


def alive(references):
    return sum(not reference.expired() for reference in references)


def test_what_is_kept_dies_with_backward_or_with_the_graph():
    x = tokens()
    twins = Twins.captured(mlp(), x)
    with watched() as kept:
        y = twins.under(fresh(x))
        assert alive(kept) == len(kept) > 0
        loss_of(y).backward()
        assert alive(kept) == 0

        y = twins.under(fresh(x))
        loss_of(y).backward(retain_graph=True)
        assert alive(kept) > 0
        del y
        assert alive(kept) == 0

        y = twins.under(fresh(x))
        assert alive(kept) > 0
        del y  # without a backward
        assert alive(kept) == 0
        assert frames_alive() == 0


def test_a_trace_leaves_no_tensors_where_parameters_have_gradients():
    """torch gives them stand-ins whose gradients hold them, in a cycle that no collector sees."""

    def stand_ins_after_training():
        model = nn.Sequential(mlp())
        recompute.apply(model, {"version": 1, "rules": [{"match": "0", "action": "recompute"}]})
        for _ in range(STEPS_TO_SETTLE + 1):
            loss_of(model(tokens())).backward()
        del model
        while gc.collect():
            pass
        return sum(isinstance(each, FakeTensor) for each in gc.get_objects())

    counts = [stand_ins_after_training() for _ in range(4)]
    assert counts[1] == counts[3], counts


def outputs_left_by(monkeypatch):
    """References to what each regeneration of outputs leaves for the region's backward, as they are made."""
    left = []
    leave = captured_function.CapturedFrame.leave

    def watch(frame, tensors):
        left.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        leave(frame, tensors)

    monkeypatch.setattr(captured_function.CapturedFrame, "leave", watch)
    return left


def test_what_a_regenerated_output_leaves_is_small_and_freed_by_the_regions_backward_or_with_the_graph(monkeypatch):
    x = tokens()
    twins = Twins(Around(RMSNorm(), after=nn.Linear(SIZE, SIZE))).settle(train(x))
    left = outputs_left_by(monkeypatch)
    expected = train(x)(twins.plain)
    y = twins.under(given := fresh(x))
    loss_of(y).backward(retain_graph=True)
    assert left
    assert alive(left) == 0
    given.grad = None
    for parameter in twins.under.parameters():
        parameter.grad = None
    loss_of(y).backward()  # runs it all again
    assert_same({"input 0": given.grad}, {"input 0": expected["input 0"]})

    left.clear()
    y = twins.under(fresh(x))
    torch.autograd.grad(loss_of(y), twins.under.after.weight)  # the region itself has no part in it
    assert alive(left) == len(left) == 1  # the statistics of the rows
    del y
    assert alive(left) == 0


def test_an_input_that_nobody_else_holds_dies_with_the_graph():
    x = tokens()
    twins = Twins.captured(mlp(), x)
    with watched():
        z = fresh(x) * 1
        reference = StorageWeakRef(z.untyped_storage())
        y = twins.under.inside(z)
        del z
        assert not reference.expired()
        del y
        assert reference.expired()
        assert frames_alive() == 0


def test_backward_frees_what_is_kept_as_it_goes():
    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counts.append(alive(kept))
            return op(*args, **(kwargs or {}))

    x = tokens()
    twins = Twins.captured(body(forward, parts=nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))), x)
    counts = []
    with watched() as kept:
        loss = loss_of(twins.under.inside(fresh(x)))
        with Look():
            loss.backward()
    assert counts == sorted(counts, reverse=True)
    assert set(range(1, len(kept) + 1)) <= set(counts)  # one after the other


def in_place(self, x):
    return self.b(F.relu(self.a(x).mul_(2).add_(1), inplace=True))


def counted_by_tape_and_not(model, rules, steps, around_the_last=nullcontext()):  # noqa: B008
    """What a step after others counts by the tape, and where it may be captured; and the latter's handle."""
    by_tape, step = copy.deepcopy(model), train(tokens())
    on_the_tape = {"rules": [{**each, "capture": False} for each in rules["rules"]]}
    handles = recompute.apply(by_tape, on_the_tape), recompute.apply(model, rules)
    for _ in range(steps):
        step(by_tape)
        step(model)
    before = [handle.stats() for handle in handles]
    with around_the_last:
        step(by_tape)
        step(model)
    expected, found = (handle.stats() - earlier for handle, earlier in zip(handles, before, strict=True))
    return expected, found, handles[1]


MODELS = {
    "mlp": (lambda: Around(mlp()), rule()),
    "gated": (lambda: Around(GatedMLP(SIZE)), rule()),
    "dropout": (lambda: Around(nn.Sequential(linear(), nn.GELU(), nn.Dropout(0.3), linear())), rule()),
    "activation": (lambda: Around(nn.GELU(), before=linear(), after=linear()), rule()),
    "in place": (lambda: Around(body(in_place, a=linear(), b=linear())), rule()),
    "layers": (lambda: Layers(), rule("layers.*")),
    "gemms": (lambda: Layers(), rule("layers.*", rerun=["gemm"])),
    "price": (lambda: Layers(), rule("layers.*", price=1e3)),
    "checkpoint": (lambda: Layers(), {"rules": [{"match": "layers.*", "action": "checkpoint", "keep": ["gemm"]}]}),
    "norm": (lambda: Around(RMSNorm(), after=linear()), rule()),
    "norms": (lambda: Layers(), rule(["**.norm*", "**.mlp"])),
}


@pytest.mark.parametrize("case", one_in(2, MODELS))
def test_a_step_counts_what_a_step_by_the_tape_counts(case):
    make, rules = case
    model = make()
    expected, found, handle = counted_by_tape_and_not(model, rules, 7)
    regions = filter(None, (region_in(attachment.runner) for attachment in handle._attachments))
    assert all(region.is_captured for region in regions)
    names = ("frames", "eager_nbytes", "dropped_tensors", "dropped_nbytes", "kept_nbytes")
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    if "norm" in str(rules) or isinstance(getattr(model, "inside", None), RMSNorm):
        # What leads to an output that others have saved runs again for them, and in part once more for the region.
        assert expected.regenerations < found.regenerations < 2 * expected.regenerations
        assert expected.regenerated_nbytes <= found.regenerated_nbytes
    else:
        assert found == expected


def test_what_the_code_of_a_checkpoint_keeps_is_counted_as_kept():
    model = Around(body(lambda self, x: F.dropout(self.a(x).exp(), 0.5).sin(), a=linear()))
    handle = recompute.apply(model, {"rules": [{"match": "inside", "action": "checkpoint"}]})
    x = tokens()
    seen = [of_one_more(lambda: train(x)(model), handle) for _ in range(STEPS_TO_SETTLE)]
    mask = x.nbytes
    assert (seen[0].kept_nbytes, seen[-1].kept_nbytes) == (0, mask)
    assert {step.eager_nbytes for step in seen} == {seen[0].eager_nbytes}
    assert all(step.kept_nbytes + step.dropped_nbytes == step.eager_nbytes for step in seen)


@pytest.mark.parametrize(("width", "is_captured"), [(64, True), (8, False)], ids=["an eighth", "more"])
def test_a_checkpoint_is_captured_that_keeps_an_eighth_of_its_input(width, is_captured):
    """Sorting may order equal values another way when it runs again, as where experts take their tokens."""
    count = LARGEST_COPY // 8 + 1
    model = Around(body(lambda self, x: (x.sigmoid() * 2)[self.a(x)[:, 0].argsort()].exp(), a=nn.Linear(width, 8)))
    handle = recompute.apply(model, {"rules": [{"match": "inside", "action": "checkpoint"}]})
    x = torch.rand(count, width, requires_grad=True)
    for _ in range(STEPS_TO_SETTLE):
        model(x).sum().backward()
    (region,) = (region_in(attachment.runner) for attachment in handle._attachments)
    assert region.is_captured is is_captured, region.failure
    assert region.failure.startswith("" if is_captured else "captured it would hold more than as a checkpoint")


def by_other_ops_if_compiled(self, x):
    y = self.a(x).exp().sin()
    return self.b((y * 2 if torch.compiler.is_compiling() else y + y).tanh())


def test_a_graph_that_is_given_up_before_it_ends_counts_nowhere(monkeypatch):
    # As with code of transformers, which may ask if it is compiled: its experts take other steps then.
    monkeypatch.setattr(frontend, "may_ask", lambda frame: True)
    model = Around(body(by_other_ops_if_compiled, a=linear(), b=linear()))
    handle = recompute.apply(model, rule())
    held = []
    counted = [of_one_more(lambda: held.append(memory_of(model, tokens())), handle) for _ in range(8)]
    assert "runs other ops" in handle.explain(wide=True)
    assert counted == [counted[0]] * 8
    by_tape = held[1]
    assert max(held[4:]) <= by_tape, "nothing of it lives on"


def memory_of(model, x):
    """Bytes held after forward, which backward then frees."""
    with no_garbage_collection():
        return step_memory(lambda: loss_of(model(x)), torch.device("cpu")).activation_bytes_held


def test_a_checkpoint_counts_a_call_that_goes_on_otherwise_than_the_recorded_one():
    """As under another autocast, where the first op is the same."""
    rules = {"rules": [{"match": "layers.*", "action": "checkpoint"}]}
    expected, found, _ = counted_by_tape_and_not(Layers(), rules, 4, torch.autocast("cpu", torch.bfloat16))
    names = ("frames", "eager_nbytes", "dropped_nbytes", "kept_nbytes")
    assert expected.frames == 2
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]


def test_a_region_that_goes_on_otherwise_while_an_equal_one_is_captured_counts_each_call_once():
    def forward(self, x):
        y = self.mlp(self.norm(x))
        return y.exp() if self.goes_on_otherwise else y + x

    layer = body(forward, norm=RMSNorm(), mlp=linear(), goes_on_otherwise=False)
    model = nn.Sequential(linear(), layer, copy.deepcopy(layer), linear())
    handle, step = recompute.apply(model, rule(["1", "2"])), train(tokens())
    for number in range(6):
        model[2].goes_on_otherwise = number == 3
        assert of_one_more(lambda: step(model), handle).frames == 2
    assert "2 of 2 run as captured code" in handle.explain(wide=True)


@pytest.mark.parametrize(
    "inside",
    [
        {"action": "recompute", "via": "hook", "rerun": ["gemm"]},
        {"action": "checkpoint"},
        {"action": "keep"},
    ],
    ids=["gemms again", "checkpoint", "keep"],
)
def test_a_rule_inside_of_a_region_is_followed_in_each_step(inside):
    twins = Twins(Layers(), {"rules": [{"match": "**.mlp", **inside}, *rule("layers.*")["rules"]]})
    step = train(tokens())
    counted = [of_one_more(lambda: twins.step(step), twins.handle) for _ in range(9)]
    assert counted[1:] == [counted[1]] * 8
    assert counted[1].dropped_nbytes > 0
    assert "stay on the tape: modules inside of it have their own rules" in twins.handle.explain(wide=True)


@pytest.mark.parametrize(
    ("most", "steps", "by_tape", "told"),
    [(9, 120, 0, "2 of 2 run as captured code"), *slow((999, 60, 40, "too few of its forwards"))],
)
def test_lengths_that_take_turns_at_random_are_captured_if_they_come_again(most, steps, by_tape, told):
    """by_tape: of the last 40 calls, two a step."""
    twins, turns, frames = Twins(Layers(), rule("layers.*")), random.Random(3), []
    for _ in range(steps):
        twins.step(train(torch.randn(turns.randint(2, most), SIZE)))
        frames.append(sum(region._frames for region in twins.regions))
    assert frames[-1] - frames[-21] == by_tape
    assert told in twins.handle.explain(wide=True)


def test_a_rule_inside_of_a_region_that_says_the_same_is_no_reason_to_stay_on_the_tape():
    model = Layers()
    alike = {"match": ["layers.*", "layers.*.mlp"], "action": "recompute", "via": "hook"}
    handle, step = recompute.apply(model, {"rules": [alike]}), train(tokens())
    for _ in range(6):
        step(model)
    assert "layers.*: 2 of 2 run as captured code" in handle.explain(wide=True)


@pytest.fixture
def ticks(monkeypatch):
    """A clock on which each op of captured code takes a second."""
    now, function_of, ticking = [0], Code._function, set()

    def timed(function):
        def run(*args, **kwargs):
            now[0] += 1
            return function(*args, **kwargs)

        ticking.add(run)
        return run

    def name_of(code, op):
        name = function_of(code, op)
        if code.names[name] not in ticking:
            code.names[name] = timed(code.names[name])
        return name

    monkeypatch.setattr(Code, "_function", name_of)
    monkeypatch.setattr(region_statistics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


otherwise = functools.partial(set_by, torch.use_deterministic_algorithms, True, False)
"""The span of another setting of torch than that of forward."""


def norms():
    """Two norms, whose outputs others save."""
    return nn.Sequential(*(Around(RMSNorm(), after=linear()) for _ in range(2)))


@pytest.mark.parametrize("around_backward", [nullcontext, otherwise], ids=["", "otherwise"])
@pytest.mark.parametrize(
    ("make", "policy"), [(Layers, rule("layers.*")), (norms, rule("*.inside"))], ids=["layers", "outputs of others"]
)
def test_what_captured_code_runs_again_is_timed_and_nothing_else(ticks, make, policy, around_backward):
    twins, x = Twins(make(), policy), tokens()
    twins.settle(train(x))
    twins.handle.time_regeneration()

    def step(module):
        loss = module(x).square().sum()
        with around_backward():
            loss.backward()
        return loss

    began = ticks[0]
    of_step = of_one_more(lambda: twins.step(step), twins.handle)
    assert of_step.regenerations > 0
    assert of_step.regenerating_seconds == of_step.regenerations < ticks[0] - began


def test_backward_that_is_not_as_recorded_is_timed_as_a_checkpoint_that_runs_again():
    twins, x = Twins(Layers(), rule("layers.*")), tokens()
    twins.settle(train(x))
    twins.handle.time_regeneration()
    before = twins.handle.stats()
    gradient = torch.ones(x.shape[1], x.shape[0]).t()  # of other strides than those that came before
    for layer in (twins.under.layers[0], twins.plain.layers[0]):
        layer(x).backward(gradient)
    of_step = twins.handle.stats() - before
    assert of_step.regenerations == 1
    assert of_step.regenerated_nbytes > 0
    assert of_step.regenerating_seconds > 0


@pytest.mark.parametrize("options", [{}, {"action": "checkpoint"}], ids=["recompute", "checkpoint"])
def test_every_step_counts_and_times_what_runs_again_also_those_that_capture(options):
    model, x = Layers(), tokens()
    rules = {"rules": [{"match": "layers.*", "action": "recompute", **options}]}
    handle = recompute.apply(model, rules)
    handle.time_regeneration()
    seen = [of_one_more(lambda: train(x)(model), handle) for _ in range(STEPS_TO_SETTLE + 1)]
    assert all(step.regenerations > 0 and step.regenerating_seconds > 0 for step in seen), seen
    assert min(step.regenerated_nbytes for step in seen) >= seen[0].dropped_nbytes
