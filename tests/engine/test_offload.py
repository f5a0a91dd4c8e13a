"""``offload``: what is held for backward leaves the device, and comes back ahead of use, bit for bit."""

import contextlib
import copy
import functools
import gc
import os
import signal
import time

import engine_testing
import pytest
import torch
from bodies import BODIES
from bodies.memory import SAVED
from bodies.runs import RUNS
from corpus import FEW_STEPS, assert_as_plain, assert_function_as_plain, never
from engine_testing import Stack, assert_same, bits, function_of, holding, loss_of, outcome, tokens, twins_of, weak
from tiers import by_default, slow
from tiny import of_one_more
from torch import nn

import recompute
from recompute.engine.host import host_memory, offload
from recompute.engine.host.host_memory import POOL, HostPool, default_limit
from recompute.engine.host.offload import OffloadedStorage
from recompute.errors import HostMemoryError, MutationError, UnsupportedError

WAYS = {
    "offload": {"action": "offload"},
    "recompute": {"action": "recompute", "via": "hook", "offload": True},
    "recompute with gemms": {"action": "recompute", "via": "hook", "rerun": ["gemm"], "offload": True},
    "checkpoint": {"action": "checkpoint", "offload": True},
    "checkpoint without gemms": {"action": "checkpoint", "keep": ["gemm"], "offload": True},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
LAYERS = 3
WIDTH = 16


def rules(match="layers.*", **way):
    return {"rules": [{"match": match, "min_bytes": 0, **(way or WAYS["offload"])}]}


class Layers(nn.Module):
    """Each holds two activations: its input, which the Linear saves, and what the tanh gives."""

    def __init__(self, count=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * 1.0)
        return x


def batch(rows=32):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)


def governed(model=None, match="layers.*", **way):
    model = model or Layers()
    return model, recompute.apply(model, rules(match, **way))


ACTIVATION = 32 * WIDTH * 4


@pytest.fixture
def copies(monkeypatch):
    """Every copy that is started: which way, and its bytes."""
    found = []
    original = offload._copy

    def spy(target, source, *, out_of_device, after):
        found.append(("out" if out_of_device else "back", source.nbytes))
        return original(target, source, out_of_device=out_of_device, after=after)

    monkeypatch.setattr(offload, "_copy", spy)
    return found


EXACT = ["several_times", "of_parts", "of_several_shapes", "gradient_penalty", "while_streams_move"]
SOME = ["draw: rrelu, last", "view: conjugate", "view: bytes", "argument: double", "change: in a chain"]
BODIES_TO_OFFLOAD = [name for name, body in BODIES.items() if not body.ways and body.may_refuse is never][::10]


@pytest.mark.parametrize("way", by_default(WAYS, "offload", "recompute", "checkpoint"))
@pytest.mark.parametrize("name", [*SOME, *slow(*BODIES_TO_OFFLOAD)])
def test_a_body_does_what_it_does_in_plain_pytorch(name, way):
    """Also noise that an op draws into what autograd has saved, which torch's own ``save_on_cpu`` copies too soon."""
    assert_as_plain(BODIES[name]._replace(drops=False), {"min_bytes": 0, **way}, FEW_STEPS)


@every_way
@pytest.mark.parametrize("run", by_default({name: RUNS[name] for name in EXACT}, "several_times", "of_several_shapes"))
def test_a_run_of_a_stack_is_bitwise_that_of_plain_pytorch(run, way):
    x = tokens()
    engine_testing.assert_as_without(
        run.make(), rules(**way), lambda model: run.run(model, x.detach().requires_grad_()), drops=False
    )


@every_way
def test_captured_code_offloads_what_it_keeps(way, copies):
    """Steps after the seventh run as straight code, where the rule captures."""
    model, x = Layers(), batch()
    plain = copy.deepcopy(model)
    with recompute.apply(model, rules(**way)) as handle:
        for _ in range(9):
            before, step = handle.stats(), len(copies)
            assert_same(outcome(model, x), outcome(plain, x))
        moved = handle.stats() - before
        assert moved.offloaded_nbytes == sum(nbytes for which, nbytes in copies[step:] if which == "out") > 0
        if way["action"] != "offload":
            assert f"layers.*: {LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)


OFFSETS = ("slice with an offset", "last chunk", "transposed", "strided slice", "expanded", "overlapping as strided")
SEEN_OTHERWISE = {
    **{name: SAVED[name] for name in OFFSETS},
    "other dtype": lambda x: x.view(torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", SEEN_OTHERWISE)
@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"]], ids=["offload", "recompute"])
def test_a_storage_is_copied_once_and_its_views_come_back_as_they_were(kind, way, copies):
    seen, x = [], tokens()

    def backward(gradient, whole, view):
        seen.append((bits(view), view.stride(), view.storage_offset()))
        assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
        return gradient * whole

    look = function_of(lambda x: x.clone(), backward, saves=lambda _, x: (x, SEEN_OTHERWISE[kind](x.detach())))
    model, _ = governed(holding(lambda self, x: look.apply(x * 2)), "inside", **way)
    model(x).sum().backward()
    view = SEEN_OTHERWISE[kind](x.detach() * 2)
    assert seen == [(bits(view), view.stride(), view.storage_offset())]
    assert [which for which, _ in copies].count("out") == 1


@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"], WAYS["checkpoint"]], ids=str)
def test_what_a_decorated_function_holds_is_offloaded(way, copies):
    assert_function_as_plain(BODIES["change: a costly result after its use"], {"min_bytes": 0, **way})
    assert copies


def test_after_forward_only_the_last_region_is_on_the_device():
    """Backward needs that at once. Everything else has left, and nothing comes back before backward."""
    model, storages = Layers(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: storages.append(weak(output)))
    recompute.apply(model, rules())
    loss = model(batch()).sum()
    assert [storage.expired() for storage in storages] == [True] * (LAYERS - 1) + [False]
    loss.backward()
    del loss
    assert all(storage.expired() for storage in storages)


def test_backward_brings_a_region_back_and_starts_the_one_before_it(copies):
    came_back, (model, _) = [], governed(Layers(5))
    for layer in model.layers:
        layer[1].register_full_backward_pre_hook(
            lambda module, gradient: came_back.append([which for which, _ in copies].count("back"))
        )
    model(batch()).sum().backward()
    # Two tensors a region. The last region has not left. Each hook runs when backward enters its region.
    assert came_back == [2, 4, 6, 8, 8]


def test_what_no_backward_comes_for_leaves_again_at_its_end(copies):
    model, _ = governed()
    with engine_testing.Census() as census:
        loss = model(batch()).sum()
        held = census.alive_nbytes()
        (gradient,) = torch.autograd.grad(loss, [model.layers[2][0].weight], retain_graph=True)
        assert "back" in [which for which, _ in copies]
        assert census.alive_nbytes() == held + gradient.nbytes
    loss.backward()


def test_a_share_of_the_bytes_travels_and_the_largest_go_first(copies):
    def forward(self, x):
        small = x[:4].exp()
        return (x.exp().sin().sum() + x.cos().exp().sum()) * small.sin().sum()

    model, _ = governed(holding(forward), "inside", action="offload", fraction=0.5)
    x, saved = batch(), {}
    model(x).backward()
    first = len(copies)
    model(x).backward()
    sizes = [nbytes for which, nbytes in copies[first:] if which == "out"]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        holding(forward)(x)
    half = 0.5 * sum(saved.values())
    assert sizes.count(ACTIVATION) == half // ACTIVATION > 0
    assert sum(sizes) <= half


def test_small_storages_and_parameters_stay(copies):
    model, _ = governed(action="offload", min_bytes=ACTIVATION + 1)
    model(batch()).sum().backward()
    assert copies == []
    model, _ = governed()
    model(batch()).sum().backward()
    assert {nbytes for _, nbytes in copies} == {ACTIVATION}  # no weight, which is smaller


def test_host_memory_is_used_again_from_step_to_step():
    model, pool = Layers(), POOL
    pool.free_unused()
    before = pool.nbytes
    recompute.apply(model, rules())
    model(batch()).sum().backward()
    used = pool.nbytes - before
    assert used == 2 * LAYERS * ACTIVATION
    for _ in range(4):
        model(batch()).sum().backward()
        model(batch())  # a graph that never runs backward
    assert pool.nbytes - before == used
    pool.free_unused()
    assert pool.nbytes == before


def test_batches_of_any_length_share_host_memory_that_is_made_once(monkeypatch):
    model, pool, made = Layers(), HostPool(), []
    plain, new = copy.deepcopy(model), pool._new
    monkeypatch.setattr(offload, "POOL", pool)
    monkeypatch.setattr(pool, "_new", lambda nbytes, *rest: (made.append(nbytes), new(nbytes, *rest))[1])
    recompute.apply(model, rules())
    for rows in range(20, 41):  # each longer than all before
        assert_same(outcome(model, batch(rows)), outcome(plain, batch(rows)))
    longest = 2 * LAYERS * 40 * WIDTH * 4
    assert longest < pool.nbytes <= 2 * longest
    for _ in range(2):
        made.clear()
        for rows in (40, 19, 8, 3, 33, 25):
            model(batch(rows)).sum().backward()
    assert made == []
    assert pool.nbytes <= 2 * longest


def test_a_share_of_what_is_held_leaves_the_device_whatever_the_length_of_the_batch():
    model, plain = twins_of(Layers())
    handle = recompute.apply(model, rules(**WAYS["offload"], fraction=0.5))
    for rows in (32, 32, 20, 40, 8, 8, 33):
        before = handle.stats()
        assert_same(outcome(model, batch(rows)), outcome(plain, batch(rows)))
        found = handle.stats() - before
        assert found.offloaded_nbytes == LAYERS * rows * WIDTH * 4  # of two alike in each layer, one


def test_a_frame_that_saves_other_tensors_than_the_last_one_offloads_no_more_than_its_share():
    def forward(self, x, times):
        for _ in range(times):
            x = (x * x).exp()
        return torch.cat([x, x], -1).tanh()

    model, handle = governed(holding(forward), "inside", **WAYS["offload"], fraction=0.5)
    for times in (1, 4, 2, 5):
        found = of_one_more(lambda: model(batch(), times).sum().backward(), handle)  # noqa: B023
        assert 0 < found.offloaded_nbytes <= found.kept_nbytes / 2


def test_a_policy_that_is_removed_gives_host_memory_back():
    model, pool = Layers(), POOL
    pool.free_unused()
    before = pool.nbytes
    with recompute.apply(model, rules()):
        model(batch()).sum().backward()
        loss = model(batch()).sum()  # whose graph lives on
        model(batch())
        assert pool.nbytes - before > 2 * LAYERS * ACTIVATION
    assert pool.nbytes - before == 2 * LAYERS * ACTIVATION
    loss.backward()


def test_memory_is_released_by_reference_count():
    model, _ = governed()
    model(batch()).sum().backward()
    with engine_testing.no_garbage_collection():
        loss = model(batch()).sum()
        assert sum(isinstance(each, OffloadedStorage) for each in gc.get_objects()) == 2 * LAYERS
        del loss
        assert not any(isinstance(each, OffloadedStorage) for each in gc.get_objects())
        assert not offload._copies


def test_stats_and_explain_say_what_left():
    model = Layers()
    with recompute.apply(model, rules()) as handle:
        model(batch()).sum().backward()
        stats = handle.stats()
        explained = handle.explain(wide=True)
    assert stats.offloaded_tensors == 2 * LAYERS
    assert stats.offloaded_nbytes == stats.kept_nbytes == stats.eager_nbytes == 2 * LAYERS * ACTIVATION
    assert stats.regenerations == stats.dropped_nbytes == 0
    assert "what is held comes back from the host" in explained
    assert "offloaded in all" in explained
    assert f"{stats.offloaded_nbytes:,}" in explained


def test_more_than_the_rule_allows_is_refused_and_the_model_goes_on_without_it():
    model, plain = twins_of(Layers())
    POOL.free_unused()
    limit = POOL.nbytes + 3 * ACTIVATION
    handle = recompute.apply(model, rules(action="offload", max_host_bytes=limit))
    with pytest.raises(HostMemoryError, match=r"in layers\.1 \(Sequential\): .* 2\.0 KiB more: .* max_host_bytes"):
        model(batch())
    handle.remove()
    assert_same(outcome(model, batch()), outcome(plain, batch()))
    assert not offload._copies


def test_the_default_limit_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(host_memory, "free_host_nbytes", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_limit() == 500
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_limit() == 125


def buffers(pool, limit, *sizes):
    return [pool.buffer(nbytes, limit, pin=False, who="a region") for nbytes in sizes]


def test_what_another_rule_was_allowed_does_not_raise_the_limit():
    pool = HostPool()
    buffers(pool, 4000, *[1000] * 4)
    (first,) = buffers(pool, 1000, 1000)
    assert pool.nbytes == first.memory.nbytes == 1000
    with pytest.raises(HostMemoryError, match="1000 B of at most 1000 B of host memory are in use"):
        buffers(pool, 1000, 1000)


def test_the_smallest_unused_buffer_serves_that_is_not_twice_too_large():
    pool = HostPool()
    buffers(pool, 100_000, 1000, 700, 900)
    held = buffers(pool, 100_000, 600, 300)
    assert [(buffer._whole.nbytes, buffer.memory.nbytes) for buffer in held] == [(700, 600), (300, 300)]
    held.clear()
    assert buffers(pool, 100_000, 700)[0].memory.nbytes == 700


def test_larger_buffers_that_would_take_room_from_what_a_rule_allows_are_freed():
    pool = HostPool()
    buffers(pool, 4000, *[1000] * 4)
    held = buffers(pool, 4000, *[500] * 6)
    assert [buffer._whole.nbytes for buffer in held] == [1000, 1000, 500, 500, 500, 500]
    assert pool.nbytes <= 4000


def test_a_buffer_is_freed_only_when_the_copies_from_and_to_it_are_done():
    pool, waited = HostPool(), []

    class Event:
        def synchronize(self):
            waited.append(pool.nbytes)

    for nbytes in (1000, 400):
        buffers(pool, None, nbytes)[0].busy = (Event(),) * 2
    held = buffers(pool, None, 1000, 150)
    assert waited == []
    held += buffers(pool, None, 3000)
    assert waited == []
    assert held[0].busy
    held.clear()
    pool.free_unused()
    assert len(waited) == 4
    assert pool.nbytes == 0


def test_what_a_pool_has_taken_does_not_lower_its_limit(monkeypatch):
    free = iter([4000, 1000])
    monkeypatch.setattr(host_memory, "free_host_nbytes", lambda: next(free))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    pool = HostPool()
    held = buffers(pool, None, 1000, 1000)
    with pytest.raises(HostMemoryError, match=r"1000 B more: 2\.0 KiB of at most 2\.0 KiB"):
        buffers(pool, None, 1000)
    assert len(held) == 2


def test_a_container_has_what_its_group_leaves_it(tmp_path, monkeypatch):
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("5000\n")
    used.write_text("2000\n")
    monkeypatch.setattr(host_memory, "_CGROUP_FILES", ((str(limit), str(used)),))
    assert host_memory.free_host_nbytes() == 3000
    limit.write_text("max\n")
    assert host_memory.free_host_nbytes() > 5000


def test_a_tensor_that_changes_after_it_was_saved_is_refused():
    def forward(self, x):
        hidden = x * 1.0
        result = hidden.exp().sum() + hidden.sin().sum()
        hidden.add_(1.0)
        return result

    model = holding(forward)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(tokens()).backward()
    recompute.apply(model, rules("inside"))
    with pytest.raises(MutationError, match=r"in inside .* was modified in place"):
        model(tokens()).backward()


@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
def test_inside_of_a_region_that_drops_that_regions_rule_decides(action, copies):
    outer = {"match": "inside", "action": action, **({"via": "hook"} if action == "recompute" else {})}
    model = holding(lambda self, x: self.layers(x), layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    policy = {"rules": [outer, *rules("inside.layers.*")["rules"]]}
    engine_testing.assert_step_as_without(model, policy, tokens(), drops=action == "checkpoint")
    assert copies == []


def test_hooks_of_others_around_it_get_everything(copies):
    engine_testing.assert_step_as_without(
        Stack(), rules(), tokens(), drops=False, around=torch.autograd.graph.save_on_cpu
    )
    assert copies == []


def test_keep_inside_stays_on_the_device(copies):
    model = Layers()
    recompute.apply(model, {"rules": [{"match": "layers.*.*", "action": "keep"}, rules()["rules"][0]]})
    model(batch()).sum().backward()
    assert copies == []


@pytest.mark.parametrize(("action", "does"), [("offload", "offloads"), ("compress", "compresses")])
def test_compiled_code_is_refused_by_name(action, does):
    model = Layers()
    recompute.apply(model, {"rules": [{"match": "layers.*", "action": action}]})
    with pytest.raises(UnsupportedError, match=f"a rule that {does} governs a module in compiled code"):
        torch.compile(model, backend="aot_eager")(batch())


# On a GPU


@contextlib.contextmanager
def slow_copies(monkeypatch, cycles):
    """Copies that start late, so that what does not wait for them reads what is not there yet."""
    original = offload._copy

    def late(target, source, *, out_of_device, after):
        device = source.device if out_of_device else target.device
        out, back = offload._streams(device)
        with torch.cuda.stream(out if out_of_device else back):
            torch.cuda._sleep(cycles())
        return original(target, source, out_of_device=out_of_device, after=after)

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copy", late)
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"], WAYS["checkpoint"]], ids=str)
def test_streams_that_lag_behind_change_no_bit(way, monkeypatch):
    model, plain = twins_of(Layers(6).cuda())
    x = torch.randn(4096, WIDTH, device="cuda", requires_grad=True)
    delays = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, 0, 2_000_000, (), generator=delays)

    def step(model):
        model.zero_grad()
        x.grad = None
        loss_of(model(x)).backward()
        return [bits(each.grad) for each in (x, *model.parameters())]

    expected = step(plain)
    recompute.apply(model, rules(**way))
    with slow_copies(monkeypatch, lambda: int(draw())):
        for _ in range(50):
            assert step(model) == expected


@pytest.mark.gpu
def test_the_device_holds_less_by_what_stats_say():
    model, x = Layers(8).cuda(), torch.randn(1 << 16, WIDTH, device="cuda", requires_grad=True)

    def held():
        model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x).sum()
        torch.cuda.synchronize()
        nbytes = torch.cuda.memory_allocated() - before
        loss.backward()
        return nbytes

    eager = held()
    with recompute.apply(model, rules()) as handle:
        before = handle.stats()
        lean = held()
        moved = (handle.stats() - before).offloaded_nbytes // 2
    assert eager - lean == pytest.approx(moved * 7 / 8, rel=0.02)  # the last region stays


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_takes_no_pinned_page_away():
    ones = torch.ones(1 << 22, dtype=torch.uint8, device="cuda")
    memory = HostPool().buffer(ones.numel(), None, pin=True, who="a test").memory
    assert memory.is_pinned()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        memory.fill_(2)  # takes another page, where the child has the same one
        memory.copy_(ones, non_blocking=True)
        torch.cuda.synchronize()
        assert memory.eq(1).all()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.gpu
def test_a_graph_capture_is_refused():
    x, (model, _) = batch().detach().cuda().requires_grad_(), governed(Layers().cuda())
    model(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="which a CUDA graph cannot capture"), torch.cuda.graph(graph):
        model(x)
