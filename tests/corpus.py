"""One way to hold a module body to plain PyTorch: bit for bit, step after step, in whatever way it runs.

A body is a row of a table in ``bodies``. ``engine/test_bodies.py`` runs each by a tape and as a checkpoint,
``compiled/test_captured_bodies.py`` as captured code.
"""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_testing import HIDDEN, TOKENS, RMSNorm, Tracker, bits, leaves, loss_of, module_of, needs_grad
from torch import Tensor, nn

import recompute
from recompute.attach.runners import region_in
from recompute.compiled import captured_function
from recompute.errors import MutationError

FEW_STEPS = (2, 2)
"""How many forwards each step has; then come, in the other order, two backwards of each."""
UNTIL_CAPTURED = (1, 1, 1, 1, 1, 1, 2)
"""Three by the tape, one more that is recorded, one that is watched, one that runs as code; and two that do."""
OWN_TORCH, OWN_PYTHON = torch.Generator(), random.Random(1)
OWN_NUMPY, OWN_LEGACY = np.random.default_rng(1), np.random.RandomState(1)
TRACKER = Tracker()
"""Sources of random numbers that bodies reach in one way or another; each step starts them anew."""


def nothing(*_):
    pass


def linear():
    return {"linear": nn.Linear(HIDDEN, HIDDEN)}


def norm():
    return {"norm": RMSNorm()}


def both():
    return linear() | norm()


def never(rule):
    return False


def always(rule):
    return True


def where_products_run_again(rule):
    return rule["action"] == "checkpoint" or "rerun" in rule


class Body(NamedTuple):
    """What a module's forward does with an activation, and what is around it."""

    forward: Callable[..., Any]
    parts: Callable[[], dict[str, Any]] = dict
    """Its attributes, made anew for each model; ``buffers`` has those that become buffers."""
    given: Callable[[Tensor], Any] = lambda x: (x,)
    """What it is given in each call, made of the activation: a tuple, or a dict of keywords."""
    start: Callable[[Any], Any] = nothing
    """What happens to the module before each step, of which it is told the number in ``step``."""
    between: Callable[[Any, Any, Any], Any] = nothing
    """What happens to the module, to what it was given last and to what it gave, before backward."""
    state: Callable[[Any], Any] = nothing
    """What else is as in plain PyTorch, after forward and after backward."""
    around: Callable[[], Any] = contextlib.nullcontext
    around_backward: Callable[[], Any] = contextlib.nullcontext
    """Spans that forward, and each backward, run in."""
    backwards: int = 2
    together: bool = False
    """Whether the two calls of a step have one backward, as they share a graph."""
    is_saved: bool = True
    """Whether others save what it gives."""
    drops: bool = True
    """Whether something is dropped, so that the comparison shows something."""
    may_refuse: Callable[[dict[str, Any]], bool] = never
    """Whether a change before backward may be refused under a rule where plain PyTorch runs."""
    changes_result: bool = False
    """Whether its result alone changes before backward: what plain PyTorch refuses then may run, as if it had not."""
    captured: bool | str | None = None
    """Whether it comes to run as captured code, or why it does not; None: that is nobody's claim."""
    ways: Sequence[str] = ()
    """The only ways in which the claim is made, if not in all."""


class Model(nn.Module):
    """A body between others, which save what it is given and what it gives."""

    def __init__(self, body, rule=None):
        """``rule``: the body is a decorated function under it, and the module is in its closure."""
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Linear(HIDDEN, HIDDEN), RMSNorm()
        parts = body.parts()
        buffers = parts.pop("buffers", {})
        self.inside = module_of(body.forward, **parts)
        for name, buffer in buffers.items():
            self.inside.register_buffer(name, buffer)
        self.body = body
        self.last = []
        self.run = lambda *args, **kwargs: self.inside(*args, **kwargs)
        if rule is not None:
            inside, run = self.inside, body.forward

            def function(*args, **kwargs):
                return run(inside, *args, **kwargs)

            self.run = recompute.recompute(function, policy={"rules": [{"match": "**", **rule}]})

    def forward(self, x):
        hidden = self.norm(self.before(x))
        given = self.body.given(hidden)
        result = self.run(**given) if isinstance(given, dict) else self.run(*given)
        self.last[:] = [given, result]
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return result, [leaf.cos() for leaf in outputs if self.body.is_saved], hidden.sin()


def start_streams(seed):
    for source in (torch, OWN_TORCH):
        source.manual_seed(seed)
    for python in (random, np.random, OWN_PYTHON, OWN_LEGACY):
        python.seed(seed)
    OWN_NUMPY.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    TRACKER.reset()


def streams():
    """Where each source of random numbers is."""
    tensors = [torch.get_rng_state(), OWN_TORCH.get_state(), TRACKER.states["model"]]
    others = [source.getstate() for source in (random, OWN_PYTHON)]
    for source in (np.random, OWN_LEGACY):
        _, words, *rest = source.get_state()
        others.append((words.tobytes(), *rest))
    return [*map(bits, tensors), *map(hash, others), OWN_NUMPY.bit_generator.state["state"]]


def seen(value, depth=4):
    """What two runs must leave alike of ``value``: types, numbers, and the bits of tensors."""
    if isinstance(value, (Tensor, int, float, str, type(None))):
        return bits(value)
    if depth and isinstance(value, dict):
        return type(value), [(str(key), seen(each, depth - 1)) for key, each in value.items()]
    if (depth and isinstance(value, (list, tuple, set))) or type(value).__name__ == "deque":
        return type(value), [seen(each, depth - 1) for each in value]
    return type(value)


def attributes(module):
    """Those of a module and of its parts, and its buffers."""
    hidden = vars(nn.Module()).keys() - {"training", "_buffers"} | {"_recompute_runner"}
    return [
        {name: seen(value) for name, value in sorted(vars(each).items()) if name not in hidden and not callable(value)}
        for each in module.modules()
    ]


def step(model, number, calls):
    """All that a step can show, or the error of a backward."""
    body, inside = model.body, model.inside
    start_streams(number)
    inside.step = number
    body.start(inside)
    x = torch.linspace(-1.5, 2, TOKENS * HIDDEN).view(TOKENS, HIDDEN).sin().requires_grad_()
    wanted = [x, *(each for each in model.parameters() if each.requires_grad)]
    with body.around():
        results = [model(x.cos() if call else x * 1.0) for call in range(calls)]
    found = [(type(leaf), needs_grad(leaf), bits(leaf)) for result in results for leaf in leaves(result)]
    with torch.no_grad():
        body.between(inside, *model.last)
    torch.rand(1), random.random(), np.random.rand()
    found.append([attributes(inside), body.state(inside), streams()])
    losses = [loss_of(results)] if body.together else [loss_of(result) for result in results]
    model.last.clear()
    del results
    gradients = []
    for loss, turn in itertools.product(reversed(losses), range(body.backwards)):
        try:
            with body.around_backward():
                grads = torch.autograd.grad(loss, wanted, retain_graph=turn + 1 < body.backwards, allow_unused=True)
        except RuntimeError as error:
            return [*found, error]
        gradients.append([bits(grad) for grad in grads])
    return [*found, [attributes(inside), body.state(inside), streams()], *gradients]


@functools.cache
def expected(body, steps):
    """What plain PyTorch gives."""
    model = Model(body)
    return [step(model, number, calls) for number, calls in enumerate(steps)]


def assert_as_plain(body, rule, steps):
    """Steps of a body under ``rule`` are those of plain PyTorch."""
    plain = expected(body, steps)
    model = Model(body)
    with recompute.apply(model, {"rules": [{"match": "inside", **rule}]}, strict=False) as handle:
        for number, calls in enumerate(steps):
            with counting() as count:
                found = step(model, number, calls)
            assert_same_step(body, rule, steps, number, found, plain[number])
        if body.drops:
            assert handle.stats().dropped_nbytes > 0
        if steps == UNTIL_CAPTURED and body.captured is not None:
            assert_captured(handle, body.captured, count())


def assert_function_as_plain(body, rule):
    """The same of a decorated function."""
    plain, model = expected(body, FEW_STEPS), Model(body, rule)
    for number, calls in enumerate(FEW_STEPS):
        assert_same_step(body, rule, FEW_STEPS, number, step(model, number, calls), plain[number])


def assert_same_step(body, rule, steps, number, found, plain):
    errors = [each[-1] if isinstance(each[-1], RuntimeError) else None for each in (found, plain)]
    if errors[0] is not None and (errors[1] is not None or body.may_refuse(rule)):
        assert isinstance(errors[0], MutationError) or "modified" in str(errors[0])
    elif errors[1] is not None and body.changes_result:  # what was dropped comes back as it was
        unchanged, gradients = expected(body._replace(between=nothing), steps)[number], body.backwards * steps[number]
        assert found[-gradients:] == unchanged[-gradients:]
    else:
        assert errors == [None, None], f"step {number}: {errors}"
        assert len(found) == len(plain)
        different = [index for index, (one, other) in enumerate(zip(found, plain, strict=True)) if one != other]
        assert not different, f"step {number}: {[(found[index], plain[index]) for index in different[:2]]}"


def assert_captured(handle, captured, code):
    regions = [region for each in handle._attachments if (region := region_in(each.runner)) is not None]
    reasons = "; ".join(region.failure for region in regions if not region.is_captured)
    if captured is True:
        assert all(region.is_captured for region in regions), reasons
        assert code > 0, "a call of the last step runs as code"
    else:
        assert code == 0
        assert captured in reasons if isinstance(captured, str) else reasons
        assert reasons.split(";")[0] in handle.explain(wide=True)


@contextlib.contextmanager
def counting(storages=None):
    """Counts the frames that run as captured code in its span.

    storages: gets the bytes of what these hold for backward, by the address of the storage.
    """
    run, count = captured_function.CapturedFrame.run, 0

    def counted(frame, *inputs):
        nonlocal count
        count += 1
        outputs = run(frame, *inputs)
        if storages is not None:
            held = [*frame.saved, *frame._kept, *(each[0] for each in frame._held if each is not None)]
            for tensor in held:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return outputs

    captured_function.CapturedFrame.run = counted
    try:
        yield lambda: count
    finally:
        captured_function.CapturedFrame.run = run
