"""Random modules under random policies: everything is bit for bit what it is without, refusals included."""

import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
from engine_testing import bits, leaves, loss_of, needs_grad
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from random_modules import BLOCKS, Model, Program, Step, is_repeatable, parse
from random_ops import MENUS, OPS, WIDTH
from tiers import by_default
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.errors import MutationError, PolicyWarning

RULES = {
    "checkpoint": {"action": "checkpoint"},
    "checkpoint but": {"action": "checkpoint", "keep": ["attention", "aten.tanh", "named"]},
    "recompute": {"action": "recompute", "via": "hook"},
    "rerun": {"action": "recompute", "via": "hook", "rerun": ["gemm", "convolution", "attention"]},
    "hold": {"action": "recompute", "via": "hook", "rerun": ["gemm", "convolution", "attention"], "hold": 64},
}
NESTED_RULES = {"": None, "keep": {"action": "keep"}, **RULES}

FRAMES = ((2, False), (3, False), (2, True), (2, False))
"""Batch and branch of each run: the last one finds what was decided in the first."""


def watched():
    """Hooks of the user's that refuse what autograd refuses without hooks."""

    def unpack(packed):
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError("modified by an inplace operation")
        return tensor

    return saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), unpack)


def copying_hooks():
    """Has autograd copy what is changed after it was saved, rather than refuse it."""

    def unpack(packed):
        tensor, copied, version = packed
        return tensor if tensor._version == version else copied  # RReLU's noise is filled after it was saved

    return saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor.detach().clone(), tensor._version), unpack)


AROUND = {
    "nothing": nullcontext,
    "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "hooks": watched,
    "checkpoint": nullcontext,
}


def is_refusal(error):
    """Whether autograd raises it because a tensor that backward needs has been changed in place."""
    return "modified by an inplace operation" in str(error)


def result_of(stage):
    """What ``stage`` gives, or the error that it raises, under the name of "error"."""
    try:
        return stage()
    except RuntimeError as error:
        return {"error": error}


class Frame:
    """One run of ``model``, and its backward passes."""

    def __init__(self, model, number, leaf, around, copying):
        self.model = model
        size, branch = FRAMES[number]
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a millisecond
        self.x, self.extra = (torch.randn(size, WIDTH).requires_grad_(leaf) for _ in range(2))
        self.loss = None
        with AROUND[around](), copying_hooks() if copying else nullcontext():
            self.forward = result_of(lambda: self._forward(branch, around == "checkpoint"))

    def _forward(self, branch, checkpointed):
        run = functools.partial(checkpoint, self.model, use_reentrant=False) if checkpointed else self.model
        outputs = leaves(run(self.x, self.extra, branch))
        if any(isinstance(output, Tensor) and output.requires_grad for output in outputs):
            self.loss = loss_of(outputs)
        wanted = {"x": self.x, "extra": self.extra, "outside": self.model.around.outside[0]}
        wanted |= dict(self.model.named_parameters())
        self.wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        found = {f"output {index}": noted(output) for index, output in enumerate(outputs)}
        found |= {f"buffer {name}": noted(buffer) for name, buffer in self.model.named_buffers()}
        return found | random_streams(self.model)

    def backward(self):
        """Twice, and once more to differentiate again."""
        if self.loss is None:
            return [{}] * 4
        stages = (self._noted_gradients, self._noted_gradients, self._second_gradients)
        found = [result_of(stage) for stage in stages]
        self.loss = None
        return [*found, random_streams(self.model)]

    def _gradients(self, **options):
        gradients = torch.autograd.grad(
            self.loss, list(self.wanted.values()), retain_graph=True, allow_unused=True, **options
        )
        return {f"gradient of {name}": gradient for name, gradient in zip(self.wanted, gradients, strict=True)}

    def _noted_gradients(self):
        return {name: noted(gradient) for name, gradient in self._gradients().items()}

    def _second_gradients(self):
        first = self._gradients(create_graph=True)
        found = {name: noted(gradient) for name, gradient in first.items()}
        if any(gradient is not None and gradient.requires_grad for gradient in first.values()):
            second = torch.autograd.grad(loss_of(first), list(self.wanted.values()), allow_unused=True)
            found |= {f"second {name}": noted(gradient) for name, gradient in zip(first, second, strict=True)}
        return found


def noted(value):
    """What can be compared later, without the graph and memory that ``value`` holds."""
    return bits(value), needs_grad(value)


def random_streams(model):
    """Where each stream of random numbers is."""
    return {
        "torch's": bits(torch.get_rng_state()),
        "a generator's": bits(model.around.generator.get_state()),
        "Python's": model.around.python.getstate(),
        "NumPy's": model.around.numpy.bit_generator.state,
    }


def trial(model, leaf, around, together, *, copying=False):
    """The stages of all frames. ``together``: all run forward before the first runs backward."""
    found, waiting = [], []
    for number in range(len(FRAMES)):
        frame = Frame(model, number, leaf, around, copying)
        found.append(frame.forward)
        waiting.append(frame)
        if not together:
            found += waiting.pop().backward()
    for frame in waiting:
        found += frame.backward()
    return found


def assert_as_plain(found, expected, copying, may_refuse):
    """``copying``: what is expected if autograd copies rather than refuses."""
    for number, (stage, plain, copied) in enumerate(zip(found, expected, copying, strict=True)):
        if "error" in stage:
            refused = isinstance(stage["error"], MutationError) or is_refusal(stage["error"])
            assert "error" in plain or (may_refuse and refused), f"stage {number} raises {stage['error']!r}"
            continue
        if "error" in plain:
            is_refused = is_refusal(plain["error"]) and "error" not in copied
            assert is_refused, f"stage {number} does not raise {plain['error']!r}"
            plain = copied
        different = [name for name in plain if stage[name] != plain[name]]
        assert not different, f"stage {number} differs in {different}"


def compare(steps, rule, *, before="free", after="", leaf=True, around="nothing", together=False):
    """The program as it is and under its rules. Returns the bytes dropped."""
    if around == "checkpoint" and (after or not is_repeatable(steps)):
        around = "nothing"  # torch's checkpoint would change twice what changes
    plain = Model(steps, rule, before, after, watched=True)
    expected = copying = trial(plain, leaf, around, together)
    if any(is_refusal(stage["error"]) for stage in expected if "error" in stage):
        copying = trial(Model(steps, rule, before, after), leaf, around, together, copying=True)
    model = Model(steps, rule, before, after)
    governed = {path: module.rule for path, module in model.named_modules() if isinstance(module, Program)}
    rules = [{"match": path, **NESTED_RULES[name]} for path, name in governed.items() if name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        with recompute.apply(model, {"rules": rules}) as handle:
            found = trial(model, leaf, around, together)
    may_refuse = after == "output" or plain.changes_what_was_lent()  # of what is kept in the place of a copy
    assert_as_plain(found, expected, copying, may_refuse)
    return handle.stats().dropped_nbytes


SAVES_NOTHING = ("add", "clone", "cat", "stack", "sum", "mean", "outside")
THEMES = {
    **{theme: [*MENUS[theme], *MENUS["values"], "module", "module"] for theme in MENUS},
    "in place": [*MENUS["in place"], *MENUS["views"], *SAVES_NOTHING * 3, "module", "module"],  # else few can run
    "blocks": [*MENUS["values"], *MENUS["costly"], "dropout", "mul_", "view", *BLOCKS, *BLOCKS],
    "everything": [*OPS, *BLOCKS, *BLOCKS],
}

# Derandomized: a test draws the same cases each time, so that one that fails in one place fails in all others, until
# it is edited. The blob that a failure prints makes the case again even then (@reproduce_failure). What is decided for
# one case is there for the next, as it is for the layers of a model: a failure may take all cases to come again.
reproducibly = settings(derandomize=True, database=None, print_blob=True, suppress_health_check=list(HealthCheck))


any_module = given(
    code=st.binary(min_size=8, max_size=32),
    rule=st.sampled_from(sorted(RULES)),
    before=st.sampled_from(["", "free", "saved"]),
    after=st.sampled_from(["", "", "", "output", "output", "parameter"]),
    leaf=st.sampled_from([True, True, True, False]),
    around=st.sampled_from(["nothing", "nothing", "nothing", *AROUND]),
    together=st.booleans(),
)


@pytest.mark.parametrize("theme", ["views", "in place", "blocks", "everything"])
@settings(reproducibly, max_examples=10)
@any_module
def test_any_module_is_bit_for_bit_what_it_is_without(theme, code, rule, **options):
    steps = parse(code, THEMES[theme], sorted(NESTED_RULES))
    note(str(steps))
    compare(steps, rule, **options)


def test_a_plan_is_given_up_where_memory_is_handed_out():
    steps = (Step("mul", 0, 0), Step("attention", 1, 0), Step("function by numpy", 0, 0))
    compare(steps, "hold", before="", after="", leaf=True, around="nothing", together=False)


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@reproducibly
@any_module
def test_so_are_as_many_modules_as_the_profile_says(theme, code, rule, **options):
    steps = parse(code, THEMES[theme], sorted(NESTED_RULES))
    note(str(steps))
    compare(steps, rule, **options)


@pytest.mark.parametrize("rule", by_default(list(RULES), "recompute"))
@pytest.mark.parametrize("op", by_default(list(OPS), *list(OPS)[::4]))
def test_each_op_alone(op, rule):
    dropped = compare((Step("exp"), Step("tanh"), Step(op), Step("sigmoid")), rule)
    assert dropped > 0 or op == "function's stash"  # which may, for all that is seen, have written to what it reads
