"""A Hugging Face decoder trained by two processes that share its weights out: what each does, holds and exchanges."""

import os
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from engine_testing import bits, module_of
from models import LAYERS_BY_KERNELS, VOCABULARY, make
from tiny import Adapter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from two_processes import distributed, synchronized

import recompute
from recompute.attach.explain import Stats
from recompute.estimation.storage_tracker import StorageTrace
from recompute.integrations.distributed import agree, verify_plan
from recompute.planning import plan_verification
from recompute.profiling.cost_table import Choice, Place, Profile, RegionCosts

STEPS = 3
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def decoder(dropout=0.25, layers=2):
    return make("llama", num_hidden_layers=layers, attention_dropout=dropout, use_cache=False)


def tensor_parallel(model, mesh):
    """Linears shared out; what is between them is whole, and a plain tensor, on both."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def sequence_parallel(model, mesh):
    """Between the Linears each has a part of the sequence: norms, adds and what they save are DTensors."""
    part, whole = Shard(1), Replicate()
    plan = {
        "input_layernorm": SequenceParallel(use_local_output=False),
        "post_attention_layernorm": SequenceParallel(use_local_output=False),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        **{name: ColwiseParallel(use_local_output="mlp" not in name) for name in COLUMNS},
        **{name: RowwiseParallel(output_layouts=part, use_local_output=False) for name in ROWS},
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part, use_local_output=False),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    return parallelize_module(model, mesh, ends)


def shared_out(model, how):
    """how: "tensor parallel", "sequence parallel", "tensor parallel, then fsdp", or one of ``distributed``."""
    if how == "tensor parallel, then fsdp":
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        return distributed(tensor_parallel(model, both["tensor"]), how, both["data"])
    ways = {"tensor parallel": tensor_parallel, "sequence parallel": sequence_parallel}
    return ways[how](model, init_device_mesh("cpu", (2,))) if how in ways else distributed(model, how)


class Collectives(TorchDispatchMode):
    """Counts the collectives that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # so that those inside are seen
        if (
            op.namespace in ("c10d", "_c10d_functional")
            and "wait" not in op.name()
            and not op.name().endswith(("barrier", "autograd"))
        ):
            self.counts[op.name()] += 1
        return op(*args, **(kwargs or {}))


class Trained(NamedTuple):
    """What one process saw."""

    values: list[Any]
    """Losses, gradients and weights, bit by bit."""
    random: Any
    """The random stream at the end."""
    collectives: tuple[Counter[str], Counter[str]]
    """Of a step's forward, and of all of it."""
    held_nbytes: int
    peak_nbytes: int
    dropped_nbytes: int
    offloaded_nbytes: int
    gathered_nbytes: int
    """Of layers' weights that another rank has, and that are here between forward and backward."""
    plans: dict[str, Any]


def adapted(model):
    """Nothing is trained but adapters of queries and values, and one norm in the middle."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(Adapter, (layer.self_attn.q_proj, layer.self_attn.v_proj))
    model.model.layers[1].input_layernorm.requires_grad_(True)
    return model


def train(how, rules, first="policy", of=bits, micro_batches=1, adapts=False):
    """Gradients are exchanged in the last of each step's micro-batches alone.

    first: what is put on first, "policy" or "wrapper". of: what is told of a loss, a gradient and a weight.
    """
    model = adapted(decoder()) if adapts else decoder()
    handle = recompute.apply(model, rules) if rules is not None and first == "policy" else None
    wrapped = shared_out(model, how)
    if rules is not None and first == "wrapper":
        handle = recompute.apply(model, rules)
    rank = 0 if "parallel" in how else dist.get_rank()  # of what is shared out by weights, both see the same
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, foreach=False)
    values = []
    for _ in range(STEPS):
        for number in range(micro_batches):
            ids = torch.randint(0, VOCABULARY, (2, 12))
            with Collectives() as seen, synchronized(wrapped, now=number == micro_batches - 1):
                loss = wrapped(input_ids=ids, labels=ids).loss
                forward, gathered = Counter(seen.counts), _gathered_nbytes(model)
                loss.backward()
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        values += [of(loss), *(of(_local(parameter.grad)) for parameter in trained)]
        optimizer.step()
        optimizer.zero_grad()
    values += [of(_local(parameter)) for parameter in wrapped.parameters()]
    random = bits(torch.get_rng_state())
    ids = torch.randint(0, VOCABULARY, (8, 64))
    wrapped(input_ids=ids, labels=ids).loss.backward()  # so that there are gradients, and what else is made once
    memory = step_memory(lambda: wrapped(input_ids=ids, labels=ids).loss)
    stats = handle.stats() if handle else Stats()
    plans = {path: _structure(plan) for path, plan in handle.plans().items()} if handle else {}
    collectives = forward, seen.counts
    return Trained(values, random, collectives, *memory, stats.dropped_nbytes, stats.offloaded_nbytes, gathered, plans)


def kernels_train_as_without(how, first):
    """The largest relative difference that kernels make to a loss, a gradient, or a weight after some steps."""
    of = lambda value: value.detach().clone()  # noqa: E731
    pairs = zip(train(how, LAYERS_BY_KERNELS, first, of).values, train(how, None, first, of).values, strict=True)
    return max(((found - plain).norm() / plain.norm().clamp_min(1e-12)).item() for found, plain in pairs)


class Seen(NamedTuple):
    """What one process saw of some steps."""

    values: list[Tensor]
    """Outputs and gradients of each."""
    random: Any
    collectives: tuple[Counter[str], Counter[str]]
    """Of a step's forward, and of all of it."""
    dropped_nbytes: int
    explained: str


def seen_by_one(model, rules, given, loss_of, steps=5):
    """given: of a step's number the context of forward and backward, which gives an input."""
    handle = recompute.apply(model, rules) if rules is not None else None
    torch.manual_seed(10 + dist.get_rank())
    values = []
    for step in range(steps):
        with given(step) as x, Collectives() if step == steps - 1 else nullcontext() as seen:
            out = model(x)
            forward = Counter(seen.counts) if seen else None
            loss_of(out).backward()
        values += [out.detach(), *(each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None)]
        model.zero_grad()
    dropped, explained = (handle.stats().dropped_nbytes, str(handle.explain())) if handle else (0, "")
    return Seen(values, bits(torch.get_rng_state()), (forward, seen.counts), dropped, explained)


def step_memory(forward):
    """Bytes held after forward, and at the peak: of the least of three steps, as gloo's threads let go late."""
    found = []
    for _ in range(3):
        with StorageTrace() as trace:
            loss = forward()
            trace.mark("forward")
            loss.backward()
        found.append((trace.held_nbytes["forward"], trace.peak_nbytes))
    return min(found)


def _structure(plan):
    """A plan as what can be sent to another process."""
    steps = [(step.name, step.inputs, step.made, step.reason) for step in plan.steps]
    return steps, plan.facts, plan.saves, plan.kept, plan.rerun, plan.outputs, plan.overwritten


def _gathered_nbytes(model):
    found = 0
    for layer in model.model.layers:
        for module in layer.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for parameter in group.fsdp_params if group else ():
                found += sum(output.untyped_storage().nbytes() for output in parameter.all_gather_outputs)
    return found


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def losses_under_deepspeed(stage, rules):
    """Of some steps under ZeRO, bit by bit; and the bytes that a policy dropped."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = decoder()
    handle = recompute.apply(model, rules) if rules else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    torch.manual_seed(10 + dist.get_rank())
    found = []
    with mock.patch.object(F, "linear", F.linear):  # ZeRO-3 replaces it, for all models and for good
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(3):
            ids = torch.randint(0, VOCABULARY, (2, 12))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(bits(loss))
    return found, handle.stats().dropped_nbytes if handle else 0


def waves(self, x):
    """Saves two tensors, and not the one that both come back from."""
    return (x * 2).sin() + (x * 3).sin()


def refusals(action):
    """What comes of changing, between forward and backward, what a region of DTensors was made from.

    Of a weight, of an activation that autograd has saved, and of one that is held so that others come back.
    """
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for what in ("weight", "saved", "source"):
        module = nn.Linear(16, 16) if what == "weight" else nn.GELU() if what == "saved" else module_of(waves)
        if what == "weight":
            parallelize_module(module, mesh, ColwiseParallel())
        recompute.apply(module, {"rules": [{**ALL, **action}]})
        whole = torch.randn(4, 16, requires_grad=True)
        x = DTensor.from_local(whole, mesh, [Replicate()])
        out = module(whole if what == "weight" else x)
        with torch.no_grad():
            (module.weight if what == "weight" else x).add_(1.0)
        try:
            out.sum().backward()
            found.append("nothing")
        except recompute.errors.MutationError as error:
            found.append(type(error).__name__)
    return found


ALL = {"match": "**"}


def chain(self, x):
    """Its middle is not to be calculated again, if it is pinned."""
    y = x.exp().sin()
    return (recompute.keep(y) if self.is_pinned else y).cos().exp()


def kept_nbytes(action, is_pinned):
    """Of a chain of ops on a DTensor: the bytes kept, and whether the gradient is as it is without a policy."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = torch.randn(8, 8)
    gradients, kept = [], 0
    for rules in (None, {"rules": [{**ALL, **action}]}):
        module = module_of(chain, is_pinned=is_pinned)
        handle = recompute.apply(module, rules) if rules else None
        part = whole.chunk(2)[dist.get_rank()].clone().requires_grad_()
        module(DTensor.from_local(part, mesh, [Shard(0)])).to_local().sum().backward()
        gradients.append(bits(part.grad))
        kept = handle.stats().kept_nbytes if handle else 0
    return kept, gradients[0] == gradients[1]


def plans_of_this_rank(is_agreed):
    """The policy of a plan for a model that both ranks share out, and the profile that it is of."""
    model = shared_out(decoder(dropout=0.0), "fsdp")
    ids = torch.randint(0, VOCABULARY, (4, 32))
    profile = recompute.profile(model, {"input_ids": ids, "labels": ids}, steps=1)
    slow = 1 + dist.get_rank()  # of what it measures, one rank has twice as much
    profile = profile.with_choices(
        lambda region: [each.model_copy(update={"held_nbytes": each.held_nbytes * slow}) for each in region.choices]
    )
    if is_agreed:
        profile = agree(profile)
    return recompute.plan(profile, budget="1GiB").to_yaml(), profile.model_dump_json()


class Verified(NamedTuple):
    """What a rank is told of a plan that was run on all of them."""

    policy: str
    profile: str
    rounds: tuple[Any, ...]
    budget_nbytes: int
    own_peaks: list[int]
    """Of the policies in the order in which they ran, what this rank has measured."""


def verified(how):
    """A plan for what rank 0 trains on, run where rank 1 has four times as much."""
    model = shared_out(decoder(dropout=0.0, layers=6), how)

    def batch(size):
        ids = torch.randint(0, VOCABULARY, (size, 64))
        return {"input_ids": ids, "labels": ids}

    tables = [None, None]
    dist.all_gather_object(tables, recompute.profile(model, batch(4), steps=1))
    profile = tables[0]
    held = recompute.plan(profile, budget="1GiB").predicted_peak_bytes - profile.static_nbytes
    own_peaks = []
    measure = plan_verification._measure

    def measured(*arguments):
        found = measure(*arguments)
        own_peaks.append(found.peak_nbytes)
        return found

    plan = recompute.plan(profile, budget=profile.static_nbytes + 3 * held)
    with mock.patch.object(plan_verification, "_measure", measured):
        plan = verify_plan(plan, model, batch(16 if dist.get_rank() else 4), steps=1)
    return Verified(plan.to_yaml(), plan.profile.model_dump_json(), plan.rounds, plan.budget_nbytes, own_peaks)


def disagreements():
    """What is said where ranks have profiled other models, and where they have plans for other budgets."""
    found = []
    for name, ask in (
        (f"of rank {dist.get_rank()}", agree),
        ("keep", lambda profile: verify_plan(recompute.plan(profile, budget=100 + dist.get_rank()), nn.Module(), None)),
    ):
        try:
            ask(_profile(name))
            found.append("nothing")
        except recompute.errors.PlanError as error:
            found.append(str(error))
    return found[0], found[1]


def _profile(name):
    """Of a model that has one way to run, called ``name``."""
    choice = Choice(
        name=name, rule=None, forward_seconds=1.0, backward_seconds=1.0, held_nbytes=1,
        forward_peak_nbytes=1, backward_peak_nbytes=1,
    )  # fmt: skip
    region = RegionCosts(name="Block", choices=(choice,), gradient_nbytes=0)
    return Profile(
        model="a model", machine={"rank": dist.get_rank()}, source="measured", static_nbytes=1, regions=(region,),
        places=(Place(path="block", region=0),), optimizer_seconds=1.0, optimizer_peak_nbytes=1,
    )  # fmt: skip
