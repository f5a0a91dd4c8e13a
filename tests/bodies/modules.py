"""What modules remember and are made of: attributes, containers, buffers, statistics, weights; and side effects."""

import contextlib
import dataclasses
import io
import logging
import warnings
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Body, always, linear, norm
from engine_testing import HIDDEN, TOKENS, GatedMLP, RMSNorm, module_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import recompute

# Attributes


def advances(self, x):
    self.count += 1
    return (x * self.count).exp().sin()


def replaced(before, after, use):
    """An attribute that is another between forward and backward."""
    return Body(
        lambda self, x: use(x, self.value).exp().sin(),
        start=lambda module: setattr(module, "value", before),
        between=lambda module, given, result: setattr(module, "value", after),
        state=lambda module: module.value is after,
    )


def grow_inner_list(value):
    value["losses"].append([len(value["losses"])])
    value["losses"][-1].append(0)


class Attributes(dict):
    def __init__(self, rows):
        super().__init__(rows=rows)
        self.__dict__ = self


@dataclasses.dataclass(slots=True)
class Slots:
    rows: list[int]


Rows, Table, Named = type("Rows", (list,), {}), type("Table", (dict,), {}), namedtuple("Named", "rows")


class Strict:
    __slots__ = ("rows", "unset")

    def __init__(self, rows):
        self.rows = rows

    def __getattr__(self, name):
        raise RuntimeError(f"there is no {name}")

    def __str__(self):
        return str(self.rows)


CONTAINERS = {
    "list": (list, lambda value: value.append(0)),
    "dict": (dict, lambda value: value.update({len(value): 0})),
    "ordered dict": (OrderedDict, lambda value: value.update({len(value): 0})),
    "set": (set, lambda value: value.add(len(value))),
    "deque": (lambda: deque([0], maxlen=3), lambda value: value.append(len(value))),
    "counter": (Counter, lambda value: value.update("a")),
    "dict of lists": (lambda: defaultdict(list), grow_inner_list),
    "list that has itself": (lambda: (one := [], one.append(one))[0], lambda value: value[0].append(0)),
    "subclass of dict": (lambda: Table({0: 0}), lambda value: value.update({len(value): 0})),
    "subclass of list": (lambda: Rows([0]), lambda value: value.append(0)),
    "subclass of dict that is its attributes": (lambda: Attributes([]), lambda value: value.rows.append(0)),
    "user dict": (UserDict, lambda value: value.update({len(value): 0})),
    "user list": (UserList, lambda value: value.append(0)),
    "chain map": (lambda: ChainMap({}, {}), lambda value: value.update({len(value): 0})),
    "named tuple of a list": (lambda: Named([]), lambda value: value.rows.append(0)),
    "tuple of lists": (lambda: ([],), lambda value: value[0].append(0)),
    "dataclass in slots": (lambda: Slots([]), lambda value: value.rows.append(0)),
    "slots that raise for other names": (lambda: Strict([]), lambda value: value.rows.append(0)),
    "namespace": (lambda: SimpleNamespace(rows=0), lambda value: setattr(value, "rows", 10 * value.rows + 1)),
    "array": (lambda: np.ones(2, int), lambda value: np.multiply(value, 10, out=value)),
    "array of Python's": (lambda: array("q", [1]), lambda value: value.append(0)),
}


def filled(number, make, change):
    """A container that forward changes, and that changes once more before backward; some are private."""
    name = "_filled" if number % 2 else "filled"

    def forward(self, x):
        change(getattr(self, name))
        return (x * len(str(getattr(self, name)))).exp().sin()

    return Body(
        forward,
        lambda: {name: make()},
        between=lambda module, *_: change(getattr(module, name)),
        state=lambda module: str(getattr(module, name)),
    )


def makes_a_module(self, x):
    if not hasattr(self, "made"):
        self.made = nn.Linear(HIDDEN, HIDDEN)
    return self.made(x).exp().sin()


def leaves_losses(self, x):
    """As auxiliary losses are left on a module, for whoever adds them up."""
    y = x.exp()
    self.loss, self.table["last"] = y.mean(), y.sum()
    self.losses.append(y.std())
    return y.sin(), [*self.losses, self.loss, self.table["last"]]


def makes_statistics(self, x):
    if self.mean is None:
        self.mean = torch.zeros(HIDDEN)
    self.mean.mul_(0.5).add_(x.detach().mean(0))
    return (x - self.mean).exp().sin()


def carries_a_state(self, x):
    self.state = (x + self.state).exp().sin()
    self.states.append(self.state)
    return self.state * self.states[0]


def noted(note):
    def forward(self, x):
        y = self.linear(x)
        note(self, y.detach())
        return F.gelu(y)

    return forward


def start_state(module):
    module.state, module.states = torch.zeros(HIDDEN), []


ATTRIBUTES = {
    "a number that advances": Body(advances, lambda: {"count": 0}),
    "a number that every call changes": Body(
        lambda self, x: advances(self, self.linear(x)), lambda: {**linear(), "count": 0}, captured=False
    ),
    "a list that every call changes": Body(
        lambda self, x: (self.seen.append(1.0), F.gelu(self.linear(x)) * len(self.seen))[1],
        lambda: {**linear(), "seen": []},
        captured=False,
    ),
    "a number that is replaced": replaced(2.0, 3.0, lambda x, value: x * value),
    "a tensor that is": replaced(torch.ones(HIDDEN), torch.zeros(HIDDEN), lambda x, value: x + value),
    "a function that is": replaced(torch.sin, torch.cos, lambda x, value: value(x)),
    "a list that is": replaced([2.0], [3.0], lambda x, value: x * value[0]),
    "a string that is": replaced("sin", "cos", lambda x, value: getattr(x, value)()),
    "a module that is": replaced(nn.Softplus(), nn.Tanh(), lambda x, value: value(x)),
    **{f"{name} that forward fills": filled(number, *each) for number, (name, each) in enumerate(CONTAINERS.items())},
    "a module that the first run makes": Body(makes_a_module),
    "losses that are left": Body(
        leaves_losses, lambda: {"losses": [], "table": {}}, start=lambda module: module.losses.clear(), together=True
    ),
    "statistics that the first run makes": Body(makes_statistics, lambda: {"mean": None}, drops=False),
    "a state with its graph": Body(carries_a_state, start=start_state, together=True),
    "set by captured code": Body(
        noted(lambda self, y: setattr(self, "last", y.mean())), lambda: {**linear(), "last": None}, captured=True
    ),
    "appended to by captured code": Body(
        noted(lambda self, y: self.seen.append(y)),
        lambda: {**linear(), "seen": []},
        start=lambda module: module.seen.clear(),
        captured=True,
    ),
    "filled by captured code": Body(
        noted(lambda self, y: self.cache.update(key=y * 2)), lambda: {**linear(), "cache": {}}, captured=True
    ),
}

# Side effects

SAID = []
LOGGER = logging.getLogger("recompute.bodies")


class Collect(logging.Handler):
    def emit(self, record):
        SAID.append(record.getMessage())


LOGGER.addHandler(Collect())


def prints(self, x):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print("hello")
    SAID.append(text.getvalue())
    return self.linear(x)


def warns(self, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    SAID.append(str(len(caught)))
    return self.linear(x)


def logs(self, x):
    LOGGER.warning("careful")
    return self.linear(x)


def selects_by_values(self, x):
    y = self.linear(x)
    return y[y.detach()[:, 0] > self.bound]


def branches_on_a_value(self, x):
    return self.linear(x) if x.sum() > self.bound else self.linear(x) * 2


def returns_otherwise_if_compiled(self, x):
    a, b = F.gelu(self.linear(x)), torch.tanh(self.linear(x))
    return (a, b) if torch.compiler.is_compiling() else (b, a)


def counts_if_not_compiled(self, x):
    if not torch.compiler.is_compiling():
        self.seen.append(1)
    return F.gelu(self.linear(x))


def start_effects(module):
    SAID.clear()
    module.bound = 1e3 if module.step < 2 else -1e3  # so that later steps take another branch


def of_effects(forward, captured, drops=True):
    return Body(
        lambda self, x: [each.exp().sin() for each in torch.utils._pytree.tree_leaves(forward(self, x))],
        lambda: {**linear(), "bound": 0.0, "seen": []},
        start=start_effects,
        state=lambda module: list(SAID),
        captured=captured,
        drops=drops,
        ways=("recompute",),
    )


ON_THE_TAPE = {
    **{each.__name__: each for each in (prints, warns, logs)},
    "reads_a_value": lambda self, x: self.linear(x) * (2 if x.sum().item() > self.bound else 3),
    "scales_by_a_value": lambda self, x: self.linear(x) * x.detach().sum().item(),
    "reads_an_array": lambda self, x: self.linear(x) * torch.from_numpy(np.tanh(x.detach().numpy())),
}
OTHERWISE_IF_COMPILED = {
    "computes_otherwise_if_compiled": lambda self, x: self.linear(x) * (2 if torch.compiler.is_compiling() else 3),
    **{each.__name__: each for each in (returns_otherwise_if_compiled, counts_if_not_compiled)},
}
EFFECTS = {
    **{name: of_effects(each, captured=False) for name, each in ON_THE_TAPE.items()},
    "branches_on_a_value": of_effects(branches_on_a_value, captured="depends on the values of tensors"),
    "branches_on_a_number": Body(
        lambda self, x: (self.linear(x) if self.sizes.tolist()[0] > 1 else x).exp().sin(),
        lambda: linear() | {"buffers": {"sizes": torch.tensor([4, 2])}},
        captured="it computes a Python number from a tensor, and branches on it",
    ),
    "selects_by_values": of_effects(selects_by_values, captured=False, drops=False),
    **{
        name: of_effects(each, captured="whether torch.compile traces it")
        for name, each in OTHERWISE_IF_COMPILED.items()
    },
}

# What a forward compares

ONE, OTHER = type("Number", (), {}), type("Number", (), {})
COMPARED = {
    "objects": (lambda m: m.one is m.other, lambda m: (ONE, OTHER)),
    "objects, by equality": (lambda m: m.one == m.other, lambda m: (ONE, OTHER)),
    "objects in lists": (lambda m: m.one in [m.other], lambda m: (ONE, OTHER)),
    "lists": (lambda m: m.one is m.other, lambda m: ([1.0], [1.0])),
    "dicts": (lambda m: m.one is m.other, lambda m: ({}, {})),
    "modules": (lambda m: m.one is m.other, lambda m: (nn.Tanh(), nn.Tanh())),
    "parameters": (lambda m: m.one is m.other, lambda m: (m.linear.bias, nn.Parameter(torch.ones(HIDDEN)))),
}


def comparing(asks, make, is_same):
    """Two that are the same, or not, but for one step: the last one before the code that was made runs again."""

    def start(module):
        if module.step == 0:
            module.pair = make(module)
        one, other = module.pair
        module.one, module.other = one, one if is_same is (module.step != 5) else other

    return Body(lambda self, x: self.linear(x).sin() * (2.0 if asks(self) else 3.0), linear, start=start, captured=True)


# Parts, and what they do to buffers

NORMALIZED = {
    "spectral norm by a hook": lambda linear: torch.nn.utils.spectral_norm(linear, n_power_iterations=2),
    "weight norm by a hook": torch.nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


def normalized(normalize):
    """Hooks, or parametrizations, make the weights anew for each run, and change buffers by that."""

    def parts():
        rest = nn.Sequential(nn.Tanh(), normalize(nn.Linear(HIDDEN, HIDDEN)))
        return {"first": normalize(nn.Linear(HIDDEN, HIDDEN)), "rest": rest}

    return Body(lambda self, x: self.rest(self.first(x).exp()).sin(), parts)


def norms():
    return {
        "conv": nn.Conv1d(TOKENS, TOKENS, 3, padding=1),
        "batch": nn.BatchNorm1d(TOKENS),
        "instance": nn.InstanceNorm1d(TOKENS, affine=True, track_running_stats=True),
        "average": nn.BatchNorm1d(TOKENS, momentum=None),
    }


def statistics_by_hand(self, x):
    """Written by a kernel that counts no version, and only in later runs."""
    return F.batch_norm(x, self.mean, self.variance, training=True).tanh().exp() if self.step else (x * 2).exp()


def resizes_a_buffer(self, x):
    """As the fake quantization of channels does it."""
    y = self.linear(x)
    size = y.detach().abs().amax(0)
    if self.scale.shape != size.shape:
        self.scale.resize_(size.shape)
    self.scale.copy_(size)
    return F.gelu(y / self.scale).sin()


def averages(self, x):
    self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return (x - self.mean).exp().tanh()


def replaces_a_buffer(self, x):
    self.average = 0.5 * self.average + x.detach().mean()
    return (x * self.average).exp().sin()


def adds_to_a_buffer(self, x):
    y = F.dropout(self.linear(x), 0.5)  # what is drawn before the departure is drawn once
    self.average.add_(self.average)
    return (y * self.average).exp().sin()


# Mixtures of experts, whose routing must not change

EXPERTS, ROUTES = 4, []
note_route = ROUTES.append  # by this a checkpoint does not see the list, which it would have appended to but once


def mixture(self, x):
    """Each token goes to the two experts that a router prefers."""
    x = self.norm(x)
    logits = self.jitter(self.router(x))
    weights, chosen = (recompute.keep(logits) if self.keeps else logits).softmax(-1).topk(2)
    note_route(str(chosen.tolist()))
    result = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        rows, places = (chosen == index).nonzero(as_tuple=True)
        result = result.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
    return (x + result).sin()


class Unsteady:
    """Turns the router's preferences around in every second run, which no engine can know of."""

    def __init__(self):
        self.sign = np.ones(1 << 14)  # too large an array to be looked into

    def __call__(self, logits):
        self.sign *= -1
        return logits * 1.0 + float(self.sign[0]) * torch.linspace(-5.0, 5.0, EXPERTS)


def mixture_of(make_jitter, keeps=False, **options):
    def parts():
        router, experts = nn.Linear(HIDDEN, EXPERTS, bias=False), nn.ModuleList(GatedMLP() for _ in range(EXPERTS))
        return {"norm": RMSNorm(), "router": router, "experts": experts, "jitter": make_jitter(), "keeps": keeps}

    def start(module):
        ROUTES.clear()
        vars(module.jitter).get("sign", np.ones(1))[:] = 1.0

    return Body(mixture, parts, start=start, **options)


def one_buffer(value=1.0, name="average"):
    return lambda: linear() | {"buffers": {name: torch.as_tensor(value).clone()}}


def in_some_runs(self, x):
    return (self.norm(x) if self.step % 2 else x).exp().sin()


def in_inference_mode():
    with torch.inference_mode():
        return {"buffers": {"bias": torch.linspace(0, 1, HIDDEN)}}


def shift_in_inference_mode(x):
    with torch.inference_mode():
        return x, torch.linspace(1, 2, HIDDEN)


def adjacency(layout):
    dense = torch.eye(TOKENS) + torch.eye(TOKENS).roll(1)
    return Body(
        lambda self, x: (self.adjacency @ x.exp()).sin(),
        lambda: {"buffers": {"adjacency": dense.to_sparse(layout=layout)}},
    )


def reads_statistics(self, x):
    y = self.norm(self.linear(x))
    return ((y - self.norm.running_mean) / (self.norm.num_batches_tracked + 1)).exp()


def update_in_no_grad(module, *_):
    """As another forward of the module between forward and backward does."""
    module.average.mul_(2.0)


COMPARISONS = {
    f"{name} that are {'the same' if is_same else 'two'} but once": comparing(*each, is_same)
    for name, each in COMPARED.items()
    for is_same in (True, False)
}
MODULES = {
    **{name: normalized(each) for name, each in NORMALIZED.items()},
    # A checkpoint refuses the second call, which runs again with what it found in the cache.
    "weight norm, cached": normalized(parametrizations.weight_norm)._replace(
        around=parametrize.cached, together=True, ways=("recompute",)
    ),
    "norms with statistics": Body(
        lambda self, x: self.average(self.instance(self.batch(self.conv(x[None])).relu()).exp()).sin(), norms
    ),
    "a norm in some steps": Body(in_some_runs, lambda: {"norm": nn.BatchNorm1d(HIDDEN)}),
    "an instance norm in some steps": Body(
        lambda self, x: in_some_runs(self, x[None])[0],
        lambda: {"norm": nn.InstanceNorm1d(TOKENS, track_running_stats=True)},
    ),
    "a norm whose statistics forward reads": Body(
        lambda self, x: (z := reads_statistics(self, x)).sin() * z.tanh(),
        lambda: {**linear(), "norm": nn.BatchNorm1d(HIDDEN)},
        together=True,
    ),
    "statistics by hand": Body(
        statistics_by_hand, lambda: {"buffers": {"mean": torch.zeros(HIDDEN), "variance": torch.ones(HIDDEN)}}
    ),
    "a buffer that the first run resizes": Body(resizes_a_buffer, one_buffer(torch.empty(0), "scale")),
    "averages in place": Body(averages, one_buffer(torch.zeros(HIDDEN), "mean")),
    "a buffer that is replaced": Body(replaces_a_buffer, one_buffer(), captured=True),
    "a buffer that is written to": Body(adds_to_a_buffer, one_buffer(), captured=False),
    "a small buffer that changes before backward": Body(
        lambda self, x: self.linear(torch.tanh(F.gelu(x) + self.average)),
        one_buffer(torch.ones(HIDDEN)),
        between=update_in_no_grad,
        captured=True,
    ),
    "a large buffer that changes before backward": Body(
        lambda self, x: self.linear(torch.tanh(F.gelu(x) + self.average[:HIDDEN])),
        one_buffer(torch.ones(1 << 18)),
        between=update_in_no_grad,
        may_refuse=always,
        drops=False,
        captured=True,
    ),
    "a buffer that is saved and changes before backward": Body(
        lambda self, x: F.gelu(self.linear(x)) * self.average,
        one_buffer(torch.ones(HIDDEN)),
        between=update_in_no_grad,
        may_refuse=always,
    ),
    "averages in place that another forward without gradients changes": Body(
        averages, one_buffer(torch.zeros(HIDDEN), "mean"), between=lambda module, given, result: module(*given)
    ),
    "a buffer of nan": Body(
        lambda self, x: (x.exp() * self.unset.nan_to_num(2.0)).sin(),
        one_buffer(torch.full((HIDDEN,), float("nan")), "unset"),
    ),
    "a buffer and an argument made in inference mode": Body(
        lambda self, x, shift: (x + self.bias + shift).exp().sin(),
        in_inference_mode,
        shift_in_inference_mode,
        captured="under torch.inference_mode()",
    ),
    "a sparse buffer": adjacency(torch.sparse_coo),
    "a sparse buffer of rows": adjacency(torch.sparse_csr),
    "eval before backward": Body(
        lambda self, x: F.dropout(self.norm(x), 0.5, self.training).exp().sin(),
        norm,
        start=lambda module: module.train(),
        between=lambda module, *_: module.eval(),
    ),
    "experts by random jitter": mixture_of(lambda: lambda logits: logits * (0.5 + torch.rand_like(logits))),
    "experts by routes that are kept": mixture_of(Unsteady, keeps=True, state=lambda module: sorted(set(ROUTES))),
    "experts by routes that nobody keeps": mixture_of(Unsteady, state=lambda module: list(ROUTES), ways=("recompute",)),
    "one module in recursion": Body(
        lambda self, x: self.shared(self.shared(x).exp()).sin(),
        lambda: {"shared": module_of(recursive, linear=nn.Linear(HIDDEN, HIDDEN), norm=RMSNorm())},
    ),
}


def recursive(self, x, depth=2):
    x = self.linear(self.norm(x)).sin()
    return x if depth == 0 else self(x, depth - 1) + self(x * 2, depth=depth - 1)
