"""``offload``: what is held for backward leaves the device, and comes back ahead of use, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bodies import BODIES
from bodies.runs import RUNS
from corpus import FEW_STEPS, assert_as_plain, assert_function_as_plain
from engine_testing import (
    VIEWS,
    Boom,
    Stack,
    assert_as_without,
    assert_same,
    assert_step_as_without,
    bits,
    holding,
    loss_of,
    outcome,
    tokens,
    weak,
)
from tiers import by_default, slow
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recompute
from recompute.engine.host import host_memory, offload
from recompute.engine.host.host_memory import HostPool, default_limit, pool_in
from recompute.engine.host.offload import OffloadedStorage
from recompute.errors import HostMemoryError, MutationError, PolicyError, UnsupportedError

WAYS: dict[str, dict[str, Any]] = {
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


# Exact


EXACT = ["several_times", "of_parts", "of_several_shapes", "gradient_penalty", "while_streams_move"]
SOME = ["draw: rrelu, last", "view: conjugate", "view: bytes", "argument: double", "change: in a chain"]
BODIES_TO_OFFLOAD = [name for name, body in BODIES.items() if not body.ways and not body.may_refuse][::10]


@every_way
@pytest.mark.parametrize("name", [*SOME, *slow(*BODIES_TO_OFFLOAD)])
def test_a_body_does_what_it_does_in_plain_pytorch(name, way):
    """Also noise that an op draws into what autograd has saved, which torch's own ``save_on_cpu`` copies too soon."""
    assert_as_plain(BODIES[name]._replace(drops=False), {"min_bytes": 0, **way}, FEW_STEPS)


@every_way
@pytest.mark.parametrize("run", by_default({name: RUNS[name] for name in EXACT}, "several_times", "of_several_shapes"))
def test_a_run_of_a_stack_is_bitwise_that_of_plain_pytorch(run, way):
    x = tokens()
    assert_as_without(run.make(), rules(**way), lambda model: run.run(model, x.detach().requires_grad_()), drops=False)


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


SEEN_OTHERWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **VIEWS,
    "other dtype": lambda x: x.view(torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", SEEN_OTHERWISE)
@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"]], ids=["offload", "recompute"])
def test_a_storage_is_copied_once_and_its_views_come_back_as_they_were(kind, way, copies):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, SEEN_OTHERWISE[kind](x.detach()))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            whole, view = ctx.saved_tensors
            seen.append((bits(view), view.stride(), view.storage_offset()))
            assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
            return gradient * whole

    model = holding(lambda self, x: Look.apply(x * 2))
    x = tokens()
    recompute.apply(model, rules("inside", **way))
    model(x).sum().backward()
    view = SEEN_OTHERWISE[kind](x.detach() * 2)
    assert seen == [(bits(view), view.stride(), view.storage_offset())]
    assert [which for which, _ in copies].count("out") == 1


@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"], WAYS["checkpoint"]], ids=str)
def test_what_a_decorated_function_holds_is_offloaded(way, copies):
    assert_function_as_plain(BODIES["change: a costly result after its use"], {"min_bytes": 0, **way})
    assert copies


# Memory


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


def test_backward_brings_a_region_back_and_starts_the_one_before_it():
    model = Layers(5)
    recompute.apply(model, rules())
    on_device = []
    for layer in model.layers:
        layer[1].register_full_backward_pre_hook(lambda module, gradient: on_device.append(_came_back(frames)))
    loss = model(batch()).sum()
    frames = _frames_of(loss)
    loss.backward()
    # The last region has not left. Each hook runs when backward enters its region.
    assert on_device == [[3], [3, 2], [2, 1], [1, 0], [0]]


def test_what_no_backward_comes_for_leaves_again_at_its_end():
    model = Layers()
    recompute.apply(model, rules())
    loss = model(batch()).sum()
    frames = _frames_of(loss)
    torch.autograd.grad(loss, [model.layers[2][0].weight], retain_graph=True)
    assert _came_back(frames) == []
    loss.backward()


def _frames_of(loss):
    frames, frame = [], offload._forward.last
    while frame is not None and (known := frame()) is not None:
        frames.append(known)
        frame = known._before
    return frames[::-1]


def _came_back(frames):
    """The frames of which something is on its way back, or there and not yet used."""
    copies = [[known for reference in frame._copies if (known := reference()) is not None] for frame in frames]
    found = [any(known._came_back is not None for known in each) for each in copies]
    return [index for index in reversed(range(len(frames))) if found[index]]


def test_a_share_of_the_bytes_travels_and_the_largest_go_first(copies):
    def forward(self, x):
        small = x[:4].exp()
        return (x.exp().sin().sum() + x.cos().exp().sum()) * small.sin().sum()

    model = holding(forward)
    recompute.apply(model, rules("inside", action="offload", fraction=0.5))
    x = batch()
    model(x).backward()
    first = len(copies)
    model(x).backward()
    sizes = [nbytes for which, nbytes in copies[first:] if which == "out"]
    half = 0.5 * sum(_saved_by(holding(forward), x))
    assert sizes.count(ACTIVATION) == half // ACTIVATION > 0
    assert sum(sizes) <= half


def _saved_by(model, x):
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return list(storages.values())


def test_small_storages_and_parameters_stay(copies):
    model = Layers()
    recompute.apply(model, rules(action="offload", min_bytes=ACTIVATION + 1))
    model(batch()).sum().backward()
    assert copies == []
    model = Layers()
    recompute.apply(model, rules())
    model(batch()).sum().backward()
    assert {nbytes for _, nbytes in copies} == {ACTIVATION}  # no weight, which is smaller


def test_host_memory_is_used_again_from_step_to_step():
    model, pool = Layers(), pool_in(None)
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
    plain, mapped = copy.deepcopy(model), pool._map
    monkeypatch.setattr(offload, "pool_in", lambda directory: pool)
    monkeypatch.setattr(pool, "_map", lambda nbytes: (made.append(nbytes), mapped(nbytes))[1])
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
    model = Layers()
    plain = copy.deepcopy(model)
    handle = recompute.apply(model, rules(**WAYS["offload"], fraction=0.5))
    for rows in (32, 32, 20, 40, 8, 8, 33):
        before = handle.stats()
        assert_same(outcome(model, batch(rows)), outcome(plain, batch(rows)))
        found = handle.stats() - before
        assert found.offloaded_nbytes == LAYERS * rows * WIDTH * 4  # of two alike in each layer, one


def test_a_frame_that_saves_other_tensors_than_the_last_one_offloads_no_more_than_its_share():
    class Sometimes(nn.Module):
        def forward(self, x, times):
            for _ in range(times):
                x = (x * x).exp()
            return torch.cat([x, x], -1).tanh()

    model = nn.ModuleDict({"inside": Sometimes()})
    handle = recompute.apply(model, rules("inside", **WAYS["offload"], fraction=0.5))
    for times in (1, 4, 2, 5):
        before = handle.stats()
        model["inside"](batch(), times).sum().backward()
        found = handle.stats() - before
        assert 0 < found.offloaded_nbytes <= found.kept_nbytes / 2


def test_a_policy_that_is_removed_gives_host_memory_back():
    model, pool = Layers(), pool_in(None)
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
    model = Layers()
    recompute.apply(model, rules())
    model(batch()).sum().backward()
    gc.collect()
    gc.disable()
    try:
        loss = model(batch()).sum()
        assert sum(isinstance(each, OffloadedStorage) for each in gc.get_objects()) == 2 * LAYERS
        del loss
        assert not any(isinstance(each, OffloadedStorage) for each in gc.get_objects())
        assert not offload._copies._known
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("place", "why"), [("gone", "No such file or directory"), ("file", "Not a directory"), ("there", "")]
)
def test_a_directory_that_takes_no_files_is_refused_when_a_policy_is_applied(place, why, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    policy = rules(action="offload", to="disk", path=str(tmp_path / place))
    if not why:
        recompute.apply(Layers(), policy)
        return
    with pytest.raises(
        PolicyError, match=rf"rules\[0\]\.path: expected a directory .* found .*{place}: {why}\. Make it"
    ):
        recompute.apply(Layers(), policy)
    with FakeTensorMode():
        recompute.apply(Layers(), policy)  # an estimate may be for another machine


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


# Refusals, and where it does nothing


def test_more_than_the_rule_allows_is_refused_and_the_model_goes_on_without_it():
    model = Layers()
    pool_in(None).free_unused()
    limit = pool_in(None).nbytes + 3 * ACTIVATION
    handle = recompute.apply(model, rules(action="offload", max_host_bytes=limit))
    with pytest.raises(HostMemoryError, match=r"in layers\.1 \(Sequential\): 2\.0 KiB more .* max_host_bytes higher"):
        model(batch())
    handle.remove()
    plain = copy.deepcopy(model)
    assert_same(outcome(model, batch()), outcome(plain, batch()))
    assert not offload._copies._known


def test_the_default_limit_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(host_memory, "free_host_nbytes", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_limit(None) == 500
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_limit(None) == 125


def test_what_another_rule_was_allowed_does_not_raise_the_limit():
    pool = HostPool()
    held = [pool.buffer(1000, 4000, pin=False, who="a region") for _ in range(4)]
    held.clear()
    first = pool.buffer(1000, 1000, pin=False, who="a region")
    assert pool.nbytes == first.memory.nbytes == 1000
    with pytest.raises(HostMemoryError, match="1000 B are in use of at most 1000 B"):
        pool.buffer(1000, 1000, pin=False, who="a region")


def test_the_smallest_unused_buffer_serves_that_is_not_twice_too_large():
    pool = HostPool()
    held = [pool.buffer(nbytes, 100_000, pin=False, who="a region") for nbytes in (1000, 700, 900)]
    held.clear()
    held = [pool.buffer(nbytes, 100_000, pin=False, who="a region") for nbytes in (600, 300)]
    assert [(buffer._whole.nbytes, buffer.memory.nbytes) for buffer in held] == [(700, 600), (300, 300)]
    held.clear()
    assert pool.buffer(700, 100_000, pin=False, who="a region").memory.nbytes == 700


def test_larger_buffers_take_no_room_from_what_a_rule_allows():
    """Where they would, they are freed, and each tensor gets a buffer of its size."""
    pool = HostPool()
    held = [pool.buffer(1000, 4000, pin=False, who="a region") for _ in range(4)]
    held.clear()
    held = [pool.buffer(500, 4000, pin=False, who="a region") for _ in range(6)]
    assert [buffer._whole.nbytes for buffer in held] == [1000, 1000, 500, 500, 500, 500]
    assert pool.nbytes <= 4000


def test_a_buffer_is_freed_only_when_the_copies_from_and_to_it_are_done():
    pool, waited = HostPool(), []

    class Event:
        def synchronize(self):
            waited.append(pool.nbytes)

    for nbytes in (1000, 400):
        pool.buffer(nbytes, None, pin=False, who="a region").busy = (Event(),) * 2
    held = [pool.buffer(nbytes, None, pin=False, who="a region") for nbytes in (1000, 150)]
    assert waited == []
    held.append(pool.buffer(3000, None, pin=False, who="a region"))
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
    held = [pool.buffer(1000, None, pin=False, who="a region") for _ in range(2)]
    with pytest.raises(HostMemoryError, match=r"1000 B more .* where 2\.0 KiB are in use of at most 2\.0 KiB"):
        pool.buffer(1000, None, pin=False, who="a region")
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
    loss = model(tokens())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    recompute.apply(model, rules("inside"))
    loss = model(tokens())
    with pytest.raises(MutationError, match=r"in inside .* has been modified in place"):
        loss.backward()


@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
def test_inside_of_a_region_that_drops_that_regions_rule_decides(action, copies):
    outer = {"match": "inside", "action": action, **({"via": "hook"} if action == "recompute" else {})}
    model = holding(lambda self, x: self.layers(x), layers=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    policy = {"rules": [outer, *rules("inside.layers.*")["rules"]]}
    assert_step_as_without(model, policy, tokens(), drops=action == "checkpoint")
    assert copies == []


def test_hooks_of_others_around_it_get_everything(copies):
    assert_step_as_without(Stack(), rules(), tokens(), drops=False, around=torch.autograd.graph.save_on_cpu)
    assert copies == []


def test_keep_inside_stays_on_the_device(copies):
    model = Layers()
    recompute.apply(model, {"rules": [{"match": "layers.*.*", "action": "keep"}, rules()["rules"][0]]})
    model(batch()).sum().backward()
    assert copies == []


def test_compiled_code_is_refused_by_name():
    model = Layers()
    recompute.apply(model, rules())
    with pytest.raises(UnsupportedError, match="a rule that offloads governs a module in compiled code"):
        torch.compile(model, backend="aot_eager")(batch())


def test_an_error_in_forward_leaves_nothing_behind():
    def forward(self, x):
        hidden = (x * 1.0).exp()
        if self.fails:
            raise Boom
        return hidden.sin()

    model = holding(forward)
    model.inside.fails = True
    plain = copy.deepcopy(model)
    recompute.apply(model, rules("inside"))
    with pytest.raises(Boom):
        model(tokens())
    assert not offload._copies._known
    for each in (model, plain):
        each.inside.fails = False
    x = tokens()
    assert_same(outcome(model, x), outcome(plain, x))


# On disk


def test_tensors_go_to_files_without_a_name_and_come_back(tmp_path, copies):
    assert_step_as_without(Stack(), rules(action="offload", to="disk", path=str(tmp_path)), tokens(), drops=False)
    assert copies
    assert list(tmp_path.iterdir()) == []
    assert pool_in(str(tmp_path))._most_in_use > pool_in(str(tmp_path)).nbytes == 0  # as the policy is gone


def test_a_directory_without_room_is_refused(tmp_path, monkeypatch):
    pool = HostPool(str(tmp_path / "absent"))
    with pytest.raises(HostMemoryError, match=r"1\.0 KiB cannot be offloaded to .*absent: No such file"):
        pool.buffer(1024, 1 << 20, pin=False, who="a region")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match="No space left on device"):
        HostPool(str(tmp_path)).buffer(1024, 1 << 20, pin=False, who="a region")
    assert list(tmp_path.iterdir()) == []


# On a GPU


@contextlib.contextmanager
def slow_copies(monkeypatch, cycles):
    """Copies that start late, so that what does not wait for them reads what is not there yet."""
    original = offload._copy

    def late(target, source, *, out_of_device, after):
        device = source.device if out_of_device else target.device
        streams = offload._streams.setdefault(device, offload._Streams(device))
        with torch.cuda.stream(streams.out if out_of_device else streams.back):
            torch.cuda._sleep(cycles())
        return original(target, source, out_of_device=out_of_device, after=after)

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_copy", late)
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("way", [WAYS["offload"], WAYS["recompute"], WAYS["checkpoint"]], ids=str)
def test_streams_that_lag_behind_change_no_bit(way, monkeypatch):
    device = torch.device("cuda")
    model = Layers(6).to(device)
    plain = copy.deepcopy(model)
    x = torch.randn(4096, WIDTH, device=device, requires_grad=True)
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
    device = torch.device("cuda")
    model, x = Layers(8).to(device), torch.randn(1 << 16, WIDTH, device=device, requires_grad=True)

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
    model = Layers().cuda()
    x = batch().detach().cuda().requires_grad_()
    recompute.apply(model, rules())
    model(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="a CUDA graph is being captured"), torch.cuda.graph(graph):
        model(x)
