"""Rotary embeddings are found by what they compute, and ours stands in without a trace anywhere else."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from tiers import one_in
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

import recompute
from recompute.substitution import rotary as rotary_file
from recompute.substitution.rotary import Rotary, find_rotary

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe"]


class CountedRopes(TorchDispatchMode):
    """How often our op ran, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name() == "recompute::rope"
        return function(*args, **(kwargs or {}))


def stand_in(model: nn.Module, **options: Any) -> list[Rotary]:
    """Have every attention in ``model`` run with ours in place, as a policy does."""
    found = []
    for module in model.modules():
        if (rotary := find_rotary(module, **options)) is not None:
            module.__class__ = with_rotary(type(module), rotary)
            found.append(rotary)
    return found


def with_rotary(base: Any, rotary: Rotary) -> Any:
    class Governed(base):
        _recompute_base = base

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return rotary.bind(self, super().forward)(*args, **kwargs)

    return Governed


def step(model: nn.Module, family: str) -> tuple[list[Tensor], int, int]:
    """Logits and gradients of a training step, how many bytes were saved, and how often our op ran."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    torch.manual_seed(0)  # a router draws
    with CountedRopes() as counted:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(**models.batch(family))
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(outputs.loss, [model.get_parameter(name) for name in names])
    nbytes = sum(storage.nbytes() for storage in storages.values())
    return [outputs.logits.detach(), *gradients], nbytes, counted.count


@pytest.mark.parametrize("family", one_in(3, list(FAMILIES)))
def test_models_compute_the_same_with_ours_in_place(family: str) -> None:
    model = models.make(family)
    expected, nbytes, _ = step(model, family)
    found = stand_in(model)
    assert [rotary.name for rotary in found] == ["apply_rotary_pos_emb"] * models.LAYERS
    values, now, count = step(model, family)
    assert count == 2 * models.LAYERS
    assert now <= nbytes
    for value, truth in zip(values, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())
    with torch.no_grad(), CountedRopes() as counted:
        model.eval()(**models.batch(family))
    assert counted.count == models.LAYERS


def test_partial_rotation_is_phi3s(device: str) -> None:
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    model = models.make("phi3", **options).to(device)
    assert model.model.rotary_emb.inv_freq.numel() == 2  # of 4 pairs of columns
    batch = {name: value.to(device) for name, value in models.batch("phi3").items()}
    expected = model(**batch).logits
    assert stand_in(model)
    with CountedRopes() as counted:
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert counted.count == models.LAYERS


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit", "whisper", "t5"])
def test_nothing_is_found_where_nothing_rotates(family: str) -> None:
    assert not any(map(find_rotary, models.make(family).modules()))


@pytest.mark.parametrize(
    "name",
    [
        "gptj.GPTJAttention",  # neighbouring columns are a pair
        "cohere.CohereAttention",
        "glm.GlmAttention",
        "esm.EsmSelfAttention",  # returns the dtype of the states
        "qwen2_vl.VisionAttention",
        "gpt_oss.GptOssAttention",  # angles of half the width
    ],
)
def test_other_rotations_are_left_alone(name: str) -> None:
    family, cls = name.split(".")
    attention = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), cls)
    assert find_rotary(object.__new__(attention)) is None


FORWARD = """
from torch import nn
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotate(q, k, cos, sin)
"""


def attention(rotate: Any, source: str = FORWARD, **others: Any) -> nn.Module:
    """A module of a class of its own, whose forward is in ``source`` and finds ``rotate`` among its globals."""
    namespace = {"rotate": rotate, "__name__": __name__, **others}
    exec(source, namespace)
    return namespace["Attention"]()


def inputs(width: int = 8, **options: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 3, 8), (2, 2, 3, 8), (1, 3, width), (1, 3, width)]
    return tuple(torch.randn(shape, generator=generator).to(**options) for shape in shapes)


def called(module: nn.Module, *args: Any) -> tuple[Any, int]:
    """What ``module`` returns with ours in place, and how often ours ran."""
    rotary = find_rotary(module)
    assert rotary is not None
    with CountedRopes() as counted:
        return rotary.bind(module, module.forward)(*args), counted.count


def fresh_rotation() -> Any:
    """A function that was never looked at."""
    plain = inspect.unwrap(phi3.apply_rotary_pos_emb)
    return types.FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__)


def half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return x * cos.unsqueeze(unsqueeze_dim) + half(x) * sin.unsqueeze(unsqueeze_dim)


def writing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    outputs = rotated(q, cos, sin), rotated(k, cos, sin)
    with torch.no_grad():
        q.zero_()
    return outputs


NEAR_MISSES: dict[str, Any] = {
    "neighbours are pairs": lambda q, k, cos, sin: tuple(x * cos[:, None] + pairs(x) * sin[:, None] for x in (q, k)),
    "the other way round": lambda q, k, cos, sin: (rotated(q, cos, -sin), rotated(k, cos, -sin)),
    "scaled a little": lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin) * (1 + 1e-7)),
    "other gradients": lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin) + k.detach() - k),
    "fixed angles": lambda q, k, cos, sin: (rotated(q, cos.detach(), sin), rotated(k, cos, sin)),
    "queries alone": lambda q, k, cos, sin: (rotated(q, cos, sin), k * 1),
    "a list": lambda q, k, cos, sin: [rotated(q, cos, sin), rotated(k, cos, sin)],
    "the first angles for all": lambda q, k, cos, sin: (rotated(q, cos[:1], sin), rotated(k, cos, sin[:1])),
    "writing": writing,
    "of the states' dtype": lambda q, k, cos, sin: tuple(rotated(x, cos, sin).to(x.dtype) for x in (q, k)),
    "other default": lambda q, k, cos, sin, unsqueeze_dim=2: tuple(rotated(x, cos, sin, unsqueeze_dim) for x in (q, k)),
    "one layout": lambda q, k, cos, sin, unsqueeze_dim=1: tuple(rotated(x, cos, sin) for x in (q, k)),
    "more to give": lambda q, k, cos, sin, ids=None: (rotated(q, cos, sin), rotated(k, cos, sin)),
    "angles first": lambda cos, sin, q, k: (rotated(q, cos, sin), rotated(k, cos, sin)),
    "by keyword": lambda *, q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
    "refusing": lambda q, k, cos, sin: [][0],
    "torch's": torch.cat,
    "a number": 3,
    "nothing": None,
}


def test_what_near_misses_miss_is_found() -> None:
    assert find_rotary(attention(lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)))) is not None


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_near_misses_are_left_alone(miss: str) -> None:
    assert find_rotary(attention(NEAR_MISSES[miss])) is None


def written_otherwise(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    (c1, c2), (s1, s2) = (angle[:, None].chunk(2, -1) for angle in (cos, sin))
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    q = torch.cat((q1 * c1 - q2 * s1, q2 * c2 + q1 * s2), -1)
    return q, torch.cat((k1 * c1 - k2 * s1, k2 * c2 + k1 * s2), -1)


def test_what_is_written_otherwise_is_found_by_what_it_computes() -> None:
    found, count = called(attention(written_otherwise), *inputs())
    assert count == 1
    for value, expected in zip(found, written_otherwise(*inputs()), strict=True):
        torch.testing.assert_close(value, expected)


SOURCES = {
    "keywords": "return rotate(k=k, q=q, sin=sin, cos=cos)",
    "unsqueeze_dim": "q, k = rotate(q.mT, k.mT, cos, sin, unsqueeze_dim=2)\n        return q.mT, k.mT",
    "in a function inside": "return (lambda *args: rotate(*args))(q, k, cos, sin)",
    "after super()": "super().train()\n        return rotate(q, k, cos, sin)",
    "an import inside": "from . import models\n        return rotate(q, k, cos, sin)",
    "builtins": "return tuple(list(rotate(q, k, cos, sin)))",
}


@pytest.mark.parametrize("source", SOURCES)
def test_however_forward_calls_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("a_package")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "a_package", package)
    monkeypatch.setitem(sys.modules, "a_package.models", models)
    line = SOURCES[source].replace(".mT", ".transpose(1, 2)")
    forward = FORWARD.replace("return rotate(q, k, cos, sin)", line)
    module = attention(llama.apply_rotary_pos_emb, forward, __package__="a_package")
    found, count = called(module, *inputs())
    assert count == 1
    for value, expected in zip(found, module(*inputs()), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    "line",
    [
        "global seen; seen = q; return rotate(q, k, cos, sin)",
        "class Inside: turn = rotate\n        return Inside.turn(q, k, cos, sin)",
        "globals(); return rotate(q, k, cos, sin)",
        "return eval('rotate')(q, k, cos, sin)",
        "return rotate.__call__(q, k, cos, sin), other(q, k, cos, sin)",
        "return self.rotate(q, k, cos, sin)",
    ],
)
def test_a_forward_that_cannot_be_copied_cleanly_is_left_alone(line: str) -> None:
    source = FORWARD.replace("return rotate(q, k, cos, sin)", line)
    assert find_rotary(attention(llama.apply_rotary_pos_emb, source, other=phi3.apply_rotary_pos_emb)) is None


def test_defaults_closures_and_attributes_are_the_copys_too() -> None:
    source = """
def make():
    from torch import nn
    scale = 2
    class Attention(nn.Module):
        def forward(self, q, k, cos, sin, power=3, *, sign=-1):
            return [sign * (scale * x) ** power for x in rotate(q, k, cos, sin)]
        forward.note = "kept"
    return Attention
Attention = make()
"""
    module = attention(written_otherwise, source)
    found, count = called(module, *inputs())
    assert count == 1
    for value, expected in zip(found, module(*inputs()), strict=True):
        torch.testing.assert_close(value, expected)
    rotary = find_rotary(module)
    assert rotary is not None
    assert rotary.copy.note == "kept"
    assert inspect.signature(rotary.copy) == inspect.signature(type(module).forward)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("seen", *function(*args, **kwargs))

    return wrapper


def keeping_it_elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapper.__wrapped__(*args, **kwargs)

    return wrapper


def test_decorators_around_forward_run_too() -> None:
    source = FORWARD.replace("    def forward", "    @decorated\n    @decorated\n    def forward")
    module = attention(written_otherwise, source, decorated=decorated)
    found, count = called(module, *inputs())
    assert count == 1
    assert found[:2] == ("seen", "seen") == module(*inputs())[:2]
    source = FORWARD.replace("    def forward", "    @decorated\n    def forward")
    assert find_rotary(attention(written_otherwise, source, decorated=keeping_it_elsewhere)) is None
    partial = functools.partial(functools.partialmethod, print)
    assert find_rotary(attention(written_otherwise, source, decorated=partial)) is None


def test_what_is_rebound_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(
        llama.apply_rotary_pos_emb, FORWARD.replace("return rotate", "return also() and rotate"), also=bool
    )
    namespace = type(module).forward.__globals__
    namespace["also"] = lambda: True
    rotary = find_rotary(module)
    assert rotary is not None
    values = inputs()

    def forward(*values: Any) -> Any:
        return rotary.bind(module, module.forward)(*values)

    def count() -> int:
        with CountedRopes() as counted:
            forward(*values)
        return counted.count

    assert count() == 1
    monkeypatch.setitem(namespace, "rotate", lambda *args: "patched")
    assert count() == 0
    assert forward(*values) == "patched"
    monkeypatch.undo()
    assert count() == 1
    namespace["also"] = lambda: ""
    assert forward(*values) == ""
    del namespace["also"]
    with pytest.raises(NameError, match="also"):
        forward(*values)


def test_a_forward_replaced_later_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(llama.apply_rotary_pos_emb)
    rotary = find_rotary(module)
    assert rotary is not None
    monkeypatch.setattr(type(module), "forward", lambda self, *args: "replaced")
    assert rotary.bind(module, module.forward)(*inputs()) == "replaced"


def test_nothing_but_the_module_changes() -> None:
    before = dict(vars(llama))
    forward = vars(llama.LlamaAttention)["forward"]
    attributes = dict(vars(forward))
    model = models.make("llama")
    stand_in(model)
    model(**models.batch("llama"))
    assert all(vars(llama)[name] is value for name, value in before.items())
    assert len(vars(llama)) == len(before)
    assert vars(llama.LlamaAttention)["forward"] is forward
    assert vars(forward) == attributes


def test_other_threads_see_the_modules_own_globals_meanwhile() -> None:
    """So that their attention runs as it is, and what they have compiled meets its guards."""
    inside, leave = threading.Event(), threading.Event()
    source = FORWARD.replace("return rotate", "return pause() or rotate") + "def turn(*args): return rotate(*args)"
    module = attention(written_otherwise, source, pause=lambda: inside.set() or (leave.wait(60) and None))
    namespace = type(module).forward.__globals__
    counter = CompileCounter()
    compiled = torch.compile(namespace["turn"], backend=counter)
    expected = compiled(*inputs())
    counts = []
    thread = threading.Thread(target=lambda: counts.append(called(module, *inputs())[1]))
    thread.start()
    assert inside.wait(60)
    try:
        with CountedRopes() as counted:
            assert all(map(torch.equal, namespace["turn"](*inputs()), written_otherwise(*inputs())))
        assert counted.count == 0
        assert all(map(torch.equal, compiled(*inputs()), expected))
        assert counter.frame_count == 1
    finally:
        leave.set()
        thread.join()
    assert counts == [1]


def test_on_cuda_only(device: str) -> None:
    model = models.make("llama").to(device)
    batch = {name: value.to(device) for name, value in models.batch("llama").items()}
    expected = model(**batch).logits
    stand_in(model, on_cuda_only=True)
    with CountedRopes() as counted:
        logits = model(**batch).logits
    assert counted.count == (models.LAYERS if device == "cuda" else 0)
    if device == "cpu":
        assert torch.equal(logits, expected)


def test_what_ours_refuses_goes_to_the_original() -> None:
    q, k, cos, sin = inputs()
    module = attention(llama.apply_rotary_pos_emb)
    for values in ((q, k, cos[:, :1], sin[:, :1]), (q.half(), k, cos, sin), (q, k, cos.int(), sin.int())):
        found, count = called(module, *values)
        assert count == 0
        assert all(map(torch.equal, found, module(*values)))
    with pytest.raises(RuntimeError, match="must match"):  # where Phi-3's function would rotate the first columns
        called(module, q, k, cos[..., :4], sin[..., :4])
    _, count = called(attention(phi3.apply_rotary_pos_emb), q, k, cos[..., :4], sin[..., :4])
    assert count == 1


class Kernelized(nn.Module):
    """What Hugging Face's ``kernels`` makes of a decorated function, and may put another forward into."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return llama.apply_rotary_pos_emb(*args, **kwargs)

    forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        lambda self, q, k, cos, sin, unsqueeze_dim=1: None
    )


def test_a_function_that_has_become_a_module() -> None:
    function = Kernelized()
    module = attention(function)
    rotary = find_rotary(module)
    assert rotary is not None
    forward = rotary.bind(module, module.forward)
    with CountedRopes() as counted:
        forward(*inputs())
        function.forward = lambda *args: "their kernel"  # type: ignore[method-assign]
        assert forward(*inputs()) == "their kernel"
    assert counted.count == 1
    assert find_rotary(module) is None


def test_a_decorated_class_is_left_alone() -> None:
    module = attention(llama.apply_rotary_pos_emb)
    recompute.recompute(type(module))
    assert find_rotary(module) is None


@contextlib.contextmanager
def a_default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, FakeTensorMode, a_default_device])
def test_found_in_any_mode(mode: Callable[[], Any]) -> None:
    function = fresh_rotation()
    with mode():
        grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert find_rotary(attention(function)) is not None
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad_mode, inference)
    assert find_rotary(attention(function)) is not None


def test_random_numbers_stay_the_same() -> None:
    def draws(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return torch.rand_like(q), torch.rand_like(k)

    before = torch.get_rng_state()
    assert find_rotary(attention(draws)) is None
    assert find_rotary(attention(fresh_rotation())) is not None
    assert torch.equal(before, torch.get_rng_state())


def test_a_function_is_tried_once_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compare = rotary_file._same_but_for_rounding
    monkeypatch.setattr(rotary_file, "_same_but_for_rounding", lambda *each: calls.append(1) or compare(*each))

    def make() -> Any:
        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return written_otherwise(q, k, cos, sin)

        return rotate

    function = make()
    modules = [attention(function) for _ in range(3)]
    assert find_rotary(modules[0]) is not None
    count = len(calls)
    assert count
    assert all(map(find_rotary, modules))
    assert len(calls) == count
    alive = weakref.ref(function)
    del function, modules
    gc.collect()
    assert alive() is None


def test_a_compiler_gets_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    base = type(attention(llama.apply_rotary_pos_emb, __name__="a_model"))
    monkeypatch.setitem(sys.modules, "a_model", types.ModuleType("a_model"))
    vars(sys.modules["a_model"]).update(base.forward.__globals__)
    rotary = find_rotary(base())
    assert rotary is not None
    module = with_rotary(base, rotary)()
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs()), base()(*inputs())))
