"""What the engine's tests share: small models, outcomes to compare bit for bit, and counts of what is alive."""

import copy
import dataclasses
import functools
import gc
import hashlib
import itertools
import sys
import threading
import types
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from tiers import by_default
from tiny import TinyMLP, TinyRMSNorm
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

import recompute
from recompute.engine import recipe_book, recipes, saved_tensors, scopes, thread_state
from recompute.engine.tape import recorder

HIDDEN = 8
TOKENS = 6
ROW_NBYTES = TOKENS * HIDDEN * 4  # of a float32 activation
CPU = torch.device("cpu")


def policy(*rules):
    """A policy of (path glob, action) pairs, all by hooks. The root's path is matched by ``**`` alone."""
    via = {"recompute": {"via": "hook"}}
    return {"rules": [{"match": match, "action": action, **via.get(action, {})} for match, action in rules]}


CHECKPOINT = policy(("layers.*", "checkpoint"))
RECOMPUTE = policy(("**.norm*", "recompute"), ("**.mlp", "recompute"), ("**.dropout", "recompute"))
BOTH = policy(("layers.0", "checkpoint"), ("**.norm*", "recompute"), ("**.mlp", "recompute"))
INSIDE = policy(("inside", "checkpoint"))
POLICIES = {"checkpoint": CHECKPOINT, "recompute": RECOMPUTE, "both": BOTH}
every_policy = pytest.mark.parametrize("rules", by_default(POLICIES, "recompute", "both"))
both_actions = pytest.mark.parametrize("action", ["checkpoint", "recompute"])

TAPES = {
    "recompute": {"action": "recompute", "via": "hook"},
    "recompute with gemms": {"action": "recompute", "via": "hook", "rerun": ["gemm"]},
    "checkpoint without attention": {"action": "checkpoint", "keep": ["attention"]},
}
"""Settings under which backward runs ops again, and no Python."""
SETTINGS = {"checkpoint": {"action": "checkpoint"}, **TAPES}


def governing(setting, *match):
    """The policy that puts what ``match`` names under ``setting``; or else the layers of a stack, and ``inside``."""
    return {"rules": [{"match": list(match) or ["layers.*", "inside"], **setting}]}


_BY_DEFAULT = ("checkpoint", "recompute")
"""What runs again under the others is between what does under these two."""
RULES_OF_SETTINGS = {name: governing(setting) for name, setting in SETTINGS.items()}
every_rule = pytest.mark.parametrize("rules", by_default(RULES_OF_SETTINGS, *_BY_DEFAULT))
every_tape = pytest.mark.parametrize("rules", by_default({key: RULES_OF_SETTINGS[key] for key in TAPES}, "recompute"))
every_policy_of_a_stack = pytest.mark.parametrize(
    "rules", by_default({**RULES_OF_SETTINGS, "parts": RECOMPUTE, "both": BOTH}, "recompute", "both")
)
"""Whole layers under one setting each; their parts; and a layer beside parts of the others."""


def module_of(forward, **parts):
    """A module that runs ``forward(self, *args)``; ``parts`` become its attributes."""
    module = type("Body", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def holding(forward, **parts):
    """A module around ``inside``, which is ``module_of(forward, **parts)``."""
    return Holder(module_of(forward, **parts))


def policed(module, action="checkpoint"):
    """``module``, with what is ``inside`` it under ``action``."""
    recompute.apply(module, policy(("inside", action)))
    return module


class Holder(nn.Module):
    """A module around another, which so has a path, and a scope around it."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


class RMSNorm(TinyRMSNorm):
    def __init__(self, size=HIDDEN):
        super().__init__(size)


class Attention(nn.Module):
    """Three projections of one normalized input, two heads."""

    is_causal = False

    def __init__(self, size=HIDDEN):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (2, -1)).transpose(-2, -3) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class GatedMLP(TinyMLP):
    def __init__(self, size=HIDDEN, inner=2 * HIDDEN):
        super().__init__(hidden=size, intermediate=inner)


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, p=0.25):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.dropout = nn.Dropout(p)
        self.mlp = GatedMLP()

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Decoder layers, a norm and a head."""

    def __init__(self, count=3, p=0.25):
        super().__init__()
        self.layers = nn.ModuleList(Layer(p) for _ in range(count))
        self.norm = RMSNorm()
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Projections(nn.Module):
    """One norm whose output three Linears save."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return self.q(y) + self.k(y) + self.v(y)


def tokens(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*(shape or (TOKENS, HIDDEN)), dtype=dtype, requires_grad=grad)


def leaves(value):
    """The leaves of nested containers and dataclasses."""
    found = []
    for leaf in tree_leaves(value):
        is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        found += leaves(vars(leaf)) if is_dataclass else [leaf]
    return found


def loss_of(result):
    """A sum of all outputs that require gradients, each element weighted differently."""
    terms = []
    for index, leaf in enumerate(leaves(result)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            wide = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            weights = torch.linspace(0.5, 1.5 + index, wide.numel(), device=leaf.device).reshape(wide.shape)
            terms.append((wide.float() * weights).sum())
    return torch.stack(terms).sum()


def outcome(module, *inputs, backwards=1, around=None):
    """What a training step makes of ``module``: outputs, gradients of each backward, buffers, the random stream."""
    given = fresh(inputs)
    torch.manual_seed(7)
    with around or nullcontext():
        result = module(*given)
    found = {f"output {index}": leaf for index, leaf in enumerate(leaves(result))}
    loss = loss_of(result)
    wanted = {f"input {index}": leaf for index, leaf in enumerate(tree_leaves(given)) if needs_grad(leaf)}
    wanted |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for turn in range(backwards):
        grads = torch.autograd.grad(loss, list(wanted.values()), retain_graph=turn + 1 < backwards, allow_unused=True)
        found |= {f"gradient {turn} of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return found | {"random": torch.get_rng_state()}


def fresh(value):
    """Copies of the tensors in ``value`` that require gradients if those do."""

    def copied(leaf):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, value)


def needs_grad(value):
    return isinstance(value, Tensor) and value.requires_grad


def bits(value):
    """What is equal for two tensors only if they agree in dtype, shape and every bit; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    dense = value.detach().resolve_conj().resolve_neg()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    # Of a copy: memory that becomes an array counts as written to unseen from then on.
    content = dense.reshape(-1).clone().view(torch.uint8).cpu().numpy().tobytes()
    return dense.dtype, tuple(dense.shape), hashlib.sha256(content).hexdigest()[:16]


def assert_same(found, expected):
    """Equal bit for bit, and the names of those that are not."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if bits(found[name]) != bits(expected[name])]
    assert not different, f"not as without the policy: {different}"


def assert_as_without(model, rules, run, *, drops=True):
    """``run(model)`` gives the same values bit for bit, and leaves the random stream alike, under ``rules`` as without.

    drops: something must be dropped, or else the comparison would show nothing.
    """
    under = copy.deepcopy(model)
    expected = _observed(run, model)
    with recompute.apply(under, rules) as handle:
        assert_same(_observed(run, under), expected)
        if drops and handle.stats().dropped_nbytes == 0:  # a first frame may begin like one of which more was kept
            _observed(run, under)
        assert not drops or handle.stats().dropped_nbytes > 0
        return handle.stats()


def _observed(run, model):
    torch.manual_seed(7)
    result = run(model)
    found = result if type(result) is dict else {f"value {index}": leaf for index, leaf in enumerate(leaves(result))}
    found = {**found, "random stream": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["random stream of the device"] = torch.cuda.get_rng_state()
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def assert_step_as_without(model, rules, *inputs, drops=True, backwards=2, around=nullcontext):
    """Backwards through one forward give the outputs, gradients, buffers and random stream of the plain model."""
    step = functools.partial(outcome, backwards=backwards)
    return assert_as_without(model, rules, lambda model: step(model, *inputs, around=around()), drops=drops)


def weak(tensor):
    """Tells, with ``expired()``, whether the tensor's memory has been freed."""
    return StorageWeakRef(tensor.untyped_storage())


def engine_objects():
    """How many frames, recipes, handles and held tensors exist."""
    kinds = (recipes.Recipe, saved_tensors.PackedTensor, recipe_book.RecipeBook, scopes.RecipeScope, recorder.Tape)
    return Counter(type(value).__name__ for value in gc.get_objects() if issubclass(type(value), kinds))


@contextmanager
def set_by(put, value, before):
    """The span of a setting, ``value``."""
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def no_garbage_collection():
    """What dies here dies by reference count, and ``gc.collect()`` tells how many objects have not.

    Gives a function that counts the engine's objects made since.
    """
    gc.collect()
    gc.freeze()  # what there is already takes no time to collect
    gc.disable()
    try:
        yield engine_objects
    finally:
        gc.enable()


def calls(function):
    """Python and C functions that ``function`` calls: a time that does not depend on the machine."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    with no_garbage_collection():
        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
    return count


def replica_of(module):
    """As ``torch.nn.parallel.replicate`` makes them: parameters are plain tensors with a graph of their own."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, replica_of(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter * 1.0)
    for name, buffer in module._buffers.items():
        setattr(replica, name, buffer)
    return replica


class Tracker:
    """Named random states that are swapped in for a span, as in tensor parallelism, on the CPU's generator."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.states = {"model": torch.Generator().manual_seed(1).get_state()}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextmanager
    def fork(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states["model"])
        try:
            yield
        finally:
            self.states["model"] = torch.get_rng_state()
            torch.set_rng_state(outside)


class Census(TorchDispatchMode):
    """Knows every storage that ops make while it is in force, and which of them are still alive."""

    __module__ = "recompute.testing"  # the engine trusts it then, as it does torch's own modes, and shows it all

    def __init__(self):
        super().__init__()
        self._made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                self._made[key] = weak(tensor), tensor.untyped_storage().nbytes()
        return result

    def alive_nbytes(self):
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def function_of(forward, backward, saves=lambda result, *given: given, *, name="Made", hides=False, is_dirty=False):
    """A custom Function of ``forward(*given)``, which saves what it was given, or ``saves(result, *given)``.

    ``backward`` gets the gradient and what was saved. hides: no hook sees what it saves. is_dirty: forward writes to
    its first argument, and returns it.
    """

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            result = forward(*given)
            if is_dirty:
                ctx.mark_dirty(given[0])
            ctx.hidden = saves(result, *given) if hides else ()
            ctx.save_for_backward(*(() if hides else saves(result, *given)))
            return result

        @staticmethod
        def backward(ctx, *gradients):
            return backward(*gradients, *ctx.saved_tensors, *ctx.hidden)

    Made.__name__ = Made.__qualname__ = name
    for each in ("forward", "backward"):  # the engine knows Functions by their code, of which each has its own
        of_all = vars(Made)[each].__func__
        code = of_all.__code__.replace(co_firstlineno=next(_LINES))
        setattr(Made, each, staticmethod(types.FunctionType(code, of_all.__globals__, each, None, of_all.__closure__)))
    return Made


def its_result(result, *given):
    return (result,)


def no_tensors(*_):
    return ()


_LINES = itertools.count(1)


def twins_of(model):
    """``model``, and a copy of it that stays as it is."""
    return model, copy.deepcopy(model)


def watched(model):
    """Gets what tells of each output of ``model`` and its parts, as they run, whether it has been freed."""
    references = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, result: references.append(weak(result)))
    return references


def in_threads(*functions):
    """Runs each in a thread of its own, all at once."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Boom(Exception):
    """What tests raise where something is to fail."""


_MODULE_CALL, _MODULE_GETATTR = nn.Module.__call__, nn.Module.__getattr__  # what torch.fx patches while it traces


@pytest.fixture(autouse=True)
def clean_thread():
    """A test starts from a seed, and must leave no hook, scope, mode, setting or patch behind."""
    torch.manual_seed(0)
    yield
    left = [*thread_state.local.books, *thread_state.local.active_frames]
    is_patched = nn.Module.__call__ is not _MODULE_CALL or nn.Module.__getattr__ is not _MODULE_GETATTR
    thread_state.local.books.clear()  # so that one test's failure is one failure
    thread_state.local.active_frames.clear()
    nn.Module.__call__, nn.Module.__getattr__ = _MODULE_CALL, _MODULE_GETATTR
    assert left == []
    assert not is_patched
    assert saved_tensors.top_hooks() is None
    assert _get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() is torch.float32
