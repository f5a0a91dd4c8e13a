"""Captured code moves once what backward moves several times, and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_testing import ROWS, SIZE, body, captured_twins, tokens, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.compiled.codegen import Code
from recompute.compiled.movements import moved_once
from recompute.compiled.recording import Recording

aten = torch.ops.aten
JOIN = torch.ops.recompute.join.default


class Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = self.recording.start(op, args, kwargs or {})
        output = op(*args, **(kwargs or {}))
        if started is not None:
            self.recording.end(started, output)
        return output


def ops_after(function: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor) -> list[Any]:
    """The ops that are left of those of ``function``, which give the same bits."""
    recording = Recording()
    for position, tensor in enumerate(given):
        recording.give(tensor, position)
    with Recorder(recording):
        result = function(*given)
    expected = result if isinstance(result, tuple) else (result,)
    outputs = [recording.use(each) for each in expected]
    calls = moved_once(recording, 0, outputs)
    code = Code(recording, tensors={number: f"t{number}" for number in range(len(given))})
    for call in calls:
        code.call(call)
    names = [code.tensor(use) for use in outputs]
    listed = ", ".join(f"t{number}" for number in range(len(given)))
    found = code.compiled([f"def run({listed}):"], f"[{', '.join(names)}]", names)(*given)
    recording.close()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    return [call.op for call in calls]


def parts(count: int = 3, *shape: int) -> list[Tensor]:
    return [torch.randn(shape or (2, 4, 6, 8)) for _ in range(count)]


def heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


MOVED = {
    "cat, then a copy": lambda *x: torch.cat(x, -1).transpose(1, 2).contiguous(),
    "copies, then cat": lambda *x: torch.cat([heads(each) for each in x], -1),
    "some copies, then cat": lambda x, y, z: torch.cat([heads(x), y.reshape(2, 6, 32), heads(z)], -1),
    "copies, cat and a copy": lambda *x: torch.cat([heads(each) for each in x], -1).transpose(0, 1).contiguous(),
    "cat in the middle, then a copy": lambda *x: torch.cat(x, 1).permute(3, 1, 0, 2).contiguous(),
    "stack, then a copy": lambda *x: torch.stack(x, 2).permute(0, 3, 1, 2, 4).contiguous(),
    "a copy of a copy": lambda x, *_: x.transpose(0, 2).contiguous().transpose(1, 3).contiguous(),
    "cat of what has gaps": lambda *x: torch.cat([each.transpose(1, 2) for each in x], -1),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_only_moves_is_one_join(name: str) -> None:
    assert ops_after(MOVED[name], *parts()) == [JOIN]


def cat_that_others_read(*x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat(x, -1)
    return both.transpose(1, 2).contiguous(), both.sum(0)


def part_that_is_written_meanwhile(*x: Tensor) -> Tensor:
    made = [each * 2 for each in x]
    both = torch.cat(made, -1)
    made[1].add_(1)
    return both.transpose(1, 2).contiguous()


def slice_of_a_cat(*x: Tensor) -> Tensor:
    return torch.cat(x, -1)[..., :12].transpose(1, 2).contiguous()


LEFT = {
    "another reads the cat": (cat_that_others_read, [aten.cat.default, aten.clone.default, aten.sum.dim_IntList]),
    "a part is written to": (
        part_that_is_written_meanwhile,
        [*[aten.mul.Tensor] * 3, aten.cat.default, aten.add_.Tensor, aten.clone.default],
    ),
    "a slice is copied": (slice_of_a_cat, [aten.cat.default, aten.clone.default]),
    "a cat of dense parts": (lambda *x: torch.cat(x, -1), [aten.cat.default]),
    "a copy in another dtype": (
        lambda *x: torch.cat(x, -1).transpose(1, 2).to(torch.float64).contiguous(),
        [aten.cat.default, aten._to_copy.default, aten.clone.default],
    ),
    "a cat that is returned": (lambda *x: torch.cat(x, -1).transpose(1, 2), [aten.cat.default]),
}


@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_as_it_is(name: str) -> None:
    function, expected = LEFT[name]
    assert ops_after(function, *parts()) == expected


def test_more_parts_than_a_join_takes_are_left_as_they_are() -> None:
    expected = [aten.cat.default, aten.clone.default]
    assert ops_after(lambda *x: torch.cat(x, -1).transpose(1, 2).contiguous(), *parts(5)) == expected


def test_a_small_copy_of_something_large_lets_go_of_it() -> None:
    def copies_of_slices(*x: Tensor) -> Tensor:
        return torch.cat([each[:, :1].transpose(1, 3).contiguous() for each in x], -1)

    assert ops_after(copies_of_slices, *parts()) == [*[aten.clone.default] * 3, aten.cat.default]


@given(st.data())
def test_random_movements_give_the_same_bits(data: Any) -> None:
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    shape = data.draw(st.lists(sizes, min_size=1, max_size=4))

    def some_order(x: Tensor) -> Tensor:
        return x.permute(data.draw(st.permutations(range(x.dim()))))

    def another_shape(x: Tensor) -> Tensor:
        """Dimensions are merged, or split, where that is a view."""
        if data.draw(st.booleans()) and x.dim() > 1 and x.is_contiguous():
            x = x.flatten(0, 1) if data.draw(st.booleans()) else x.flatten(-2)
        if data.draw(st.booleans()) and x.shape[-1] % 2 == 0:
            x = x.unflatten(-1, data.draw(st.sampled_from([(2, -1), (-1, 2)])))
        return x

    def moved(*x: Tensor) -> Tensor:
        dim = data.draw(st.integers(0, x[0].dim() - 1))
        made = [some_order(each).contiguous() if data.draw(st.booleans()) else each for each in x]
        made = [each.view(x[0].shape) if each.is_contiguous() else each for each in made]
        put = torch.stack if data.draw(st.booleans()) else torch.cat
        y = put(made, dim)
        for _ in range(data.draw(st.integers(0, 3))):
            y = some_order(another_shape(y)).contiguous()
        return y

    ops_after(moved, *[torch.randn(shape) for _ in range(data.draw(st.integers(1, 4)))])


HEADS = 2


def mix(self: Any, x: Tensor) -> Tensor:
    """Attention in short, of q, k and v that one Linear gives, as in GPT-NeoX."""
    qkv = self.qkv(x).view(ROWS, HEADS, -1).transpose(0, 1)
    q, k, v = qkv.chunk(3, -1)
    return self.out((torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(0, 1).reshape(ROWS, -1))


def test_backward_of_a_captured_layer_joins_the_gradients_of_q_k_and_v() -> None:
    x = tokens(ROWS, SIZE)
    twins = captured_twins(body(mix, qkv=nn.Linear(SIZE, 3 * HEADS * SIZE), out=nn.Linear(HEADS * SIZE, SIZE)), x)
    (region,) = twins.regions
    sources = [program.backward.source for graph in region._graphs() for program in graph._programs]
    assert sources
    for source in sources:
        assert source.count("recompute_join") == 1
        assert "aten_cat" not in source
    twins.step(train(x))
