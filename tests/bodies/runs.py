"""Runs of a stack of layers: all the ways in which autograd is asked for gradients, and what others do around it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from engine_testing import HIDDEN, TOKENS, Stack, bits, in_threads, leaves, loss_of, module_of, replica_of, tokens
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.utils.checkpoint import checkpoint


class Run(NamedTuple):
    run: Callable[[Any, Tensor], Any]
    """What is done with a model and an input, which takes a gradient. It leaves no hook behind."""
    make: Callable[[], nn.Module] = lambda: Stack(count=2)
    drops: bool = True
    captured: bool = True
    """Whether captured code gives the same bits: not where gradients are differentiated in their turn."""


def twice_differentiable(count=2, p=0.25):
    """A stack without what torch differentiates but once, or not in forward mode: fused attention, and SiLU."""
    model = Stack(count, p)
    for layer in model.layers:
        layer.attention, layer.mlp.act_fn = layer.attention.q, nn.Tanh()
    return model


def all_of(model, x):
    return [x, *model.parameters()]


# Several backwards


def of_parts(model, x):
    """Disjoint backwards of one graph, and subsets of gradients."""
    result = model(x)
    some = grad(result[:2].sum(), [model.layers[1].mlp.up_proj.weight], retain_graph=True)
    torch.rand(2)
    other = grad(result[2:].sum(), [x, model.norm.weight], retain_graph=True)
    each = [grad(result.sum(), one, retain_graph=True) for one in [*model.parameters()][:4]]
    return some, other, each, grad(result.sum(), list(model.parameters()))


def several_times(model, x):
    loss = loss_of(model(x))
    for turn in range(3):
        loss.backward(retain_graph=turn < 2)
    return x.grad, [each.grad for each in model.parameters()]


def piled_up(model, x):
    for factor in (1, 2, 3):
        loss_of(model(x * factor)).backward()
    return x.grad, [each.grad for each in model.parameters()]


def of_several_shapes(model, x):
    """Several graphs are alive at once and run backward in any order, and one never does."""
    inputs = [tokens(rows, HIDDEN) for rows in (TOKENS, 3, TOKENS, 1, TOKENS, TOKENS)]
    losses = [loss_of(model(x)) for x in inputs]
    return [grad(losses[i], all_of(model, inputs[i])) for i in (2, 0, 5, 3, 4)]


def while_streams_move(model, x):
    losses = [loss_of(model(x)) for _ in range(2)]
    found = [torch.rand(2)]
    for loss in reversed(losses):
        for wanted in (x, model.layers[0].norm1.weight, model.layers[1].mlp.up_proj.weight):
            found += [grad(loss, wanted, retain_graph=True), torch.rand(2)]
    return found


def two_graphs_that_share_a_region(model, x):
    hidden = model.layers[0](x)
    one, two = model.layers[1](hidden), model.layers[1](hidden * 2)
    return grad(two.sum(), x, retain_graph=True), grad(one.sum(), x)


def one_region_twice_in_a_row(model, x):
    return grad(loss_of(model.layers[0](model.layers[0](x))), x)


# Gradients of odd layouts


def directions_of(x):
    return torch.eye(x.numel()).reshape(-1, *x.shape)[:3]


def batched(model, x):
    wanted = [x, model.layers[0].mlp.up_proj.weight]
    return grad(model.layers[0](x), wanted, directions_of(x), is_grads_batched=True)


def batched_by_vmap(model, x):
    result = model(x)
    return torch.func.vmap(lambda direction: grad(result, x, direction, retain_graph=True)[0])(directions_of(x))


def of_a_sum(model, x):
    return grad(model.layers[0](x).sum(), x)  # whose gradient is one number, expanded


def transposed(model, x):
    return grad(model.layers[0](x), x, torch.linspace(0, 1, x.numel()).reshape(x.shape[::-1]).t())


def read_outside_too(model, x):
    z = x * 2
    before, y, after = z.exp(), model.layers[0](z), z.cos()
    first = grad(loss_of(after) * 3 + loss_of(before) / 7 + loss_of(y), x, retain_graph=True)
    return first, grad(loss_of(after) * 3 + loss_of(before) / 7 + y.sum(), x)


# Hooks


def with_hooks(model, x):
    """On an input, on weights and on an output, which change the gradient."""
    seen = []
    weight = model.layers[0].norm1.weight
    hooks = [
        x.register_hook(lambda gradient: gradient * 3),
        weight.register_hook(lambda gradient: gradient * 2),
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(1)),
    ]
    z = x * 1
    z.register_hook(lambda gradient: gradient + 1)
    y = model.layers[0](z)
    y.register_hook(lambda gradient: gradient * 2)
    y.retain_grad()
    loss_of(y).backward()
    for hook in hooks:
        hook.remove()
    return x.grad, y.grad, weight.grad, len(seen)


def with_hooks_inside(model, x):
    """On modules, on a tensor inside of a layer, and on a weight that is used outside, too."""
    seen, norm = [], model.layers[0].norm1

    def note(*given):
        seen.extend(bits(leaf) for leaf in leaves(given) if isinstance(leaf, Tensor))

    hooks = [norm.register_forward_hook(lambda module, args, result: (result.register_hook(note), None)[1])]
    for each in model.modules():
        hooks += [each.register_full_backward_pre_hook(note), each.register_full_backward_hook(note)]
    hooks += [norm.weight.register_hook(note), norm.weight.register_post_accumulate_grad_hook(note)]
    loss = loss_of(model(x * norm.weight) * norm.weight)
    for turn in range(2):
        seen.append(turn)
        loss.backward(retain_graph=turn == 0)
    for hook in hooks:
        hook.remove()
    return seen


def update_in_a_hook(model, x):
    """Weights change while backward goes on: what needs them must have been regenerated by then."""

    def update(leaf):
        leaf.add_(leaf.grad, alpha=-0.1)
        leaf.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    for _ in range(3):
        loss_of(model(x.detach())).backward()
    for hook in hooks:
        hook.remove()
    return list(model.parameters())


def backward_in_a_hook(model, x):
    inner = []
    given = x.detach().requires_grad_()
    hidden = given * 1.0

    def run_backward(gradient):
        with torch.enable_grad():
            inner.extend(grad(loss_of(model(x * 2.0)), all_of(model, x)))

    hidden.register_hook(run_backward)
    return grad(loss_of(model(hidden)), all_of(model, given)), inner


def backward_in_its_own_hook(model, x):
    inner = []
    middle = model.layers[0](x)
    loss = loss_of(model.layers[1](middle))

    def run_backward(gradient):
        if not inner:
            inner.append(None)
            inner.extend(grad(loss, all_of(model, x), retain_graph=True, allow_unused=True))

    middle.register_hook(run_backward)
    return grad(loss, all_of(model, x), retain_graph=True, allow_unused=True), inner


# Gradients of gradients, and functional ones


def gradient_penalty(model, x):
    loss = loss_of(model(x))
    (slope,) = grad(loss, x, create_graph=True)
    return grad(loss + slope.pow(2).sum(), list(model.parameters()))


def functional(model, x):
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).sin().sum()

    x = x.detach()
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.stack([x] * 2))
    _, tangent = torch.func.jvp(lambda x: loss(weights, x), (x,), (torch.ones_like(x),))
    return list(torch.func.grad(loss)(weights, x).values()), list(per_sample.values()), tangent


def on_other_weights(model, x):
    """That are no leaves, in the places of parameters."""
    weights = {name: value * 2.0 for name, value in model.named_parameters()}
    return grad(loss_of(torch.func.functional_call(model, weights, (x,))), all_of(model, x))


def vmapped(model, x):
    inputs = torch.stack([x, x.cos()])
    return grad(torch.func.vmap(model)(inputs).sum(), all_of(model, x))


def directional(model, x):
    """Of an argument that is dual, and backward through that, inside and outside of the level."""
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))
        inside = grad(output.primal.sum() + output.tangent.sum(), all_of(model, x), retain_graph=True)
    return output.tangent.clone(), inside


def directional_in_parameters(model, x):
    with forward_ad.dual_level():
        named = {name: forward_ad.make_dual(value, value.cos()) for name, value in model.named_parameters()}
        output = forward_ad.unpack_dual(torch.func.functional_call(model, named, (x,)))
        return output.primal.clone(), output.tangent.clone()


def directional_inside(model, x):
    """With a region before the level, run again in it."""
    result = model(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent
        return tangent.clone(), grad(result.sum(), all_of(model, x))


def hessian_product(model, x):
    return torch.autograd.functional.hvp(lambda x: model(x).sin().sum(), x, x.cos())


def jacobians(model, x):
    both = torch.func.jacfwd(model)(x[:2]), torch.func.jacrev(model)(x[:2])
    return *both, torch.autograd.functional.jacobian(model, x[:2], vectorize=True)


# What others do around it


def in_another_thread(model, x):
    loss, found = loss_of(model(x)), []
    in_threads(lambda: found.extend(grad(loss, all_of(model, x))))
    return found


def by_replicas(model, x):
    """As data parallel makes them; they give the parameters their gradients."""
    inputs, results = [x.detach(), x.detach().cos()], [None, None]
    replicas = [replica_of(model) for _ in inputs]

    def forward(index):
        results[index] = loss_of(replicas[index](inputs[index]))

    in_threads(*(functools.partial(forward, index) for index in range(2)))
    return grad(sum(results), list(model.parameters()))


def in_torchs_checkpoint(reentrant):
    def run(model, x):
        torch.manual_seed(3)
        loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
        return x.grad, [each.grad for each in model.parameters()]

    return run


def with_torchs_checkpoint_inside():
    """A reentrant one in the middle of each layer, which draws in it."""
    model = Stack(2)
    for layer in model.layers:
        inside = nn.Sequential(layer.mlp, nn.Dropout(0.5))
        layer.mlp = module_of(lambda self, x: checkpoint(self.inside, x * 2, use_reentrant=True), inside=inside)
    return model


def under_anomaly_detection(model, x):
    with torch.autograd.detect_anomaly():
        return grad(loss_of(model(x)), all_of(model, x))


def laid_out_in_one_storage(model, x):
    """As by ZeRO: each parameter has its own count of versions, whatever the others'."""
    parameters = list(model.parameters())
    flat, offset = torch.cat([each.detach().reshape(-1) for each in parameters]), 0
    for number, parameter in enumerate(parameters):
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
        with torch.no_grad():
            for _ in range(number):
                parameter.add_(0.001)
    return [grad(loss_of(model(x)), parameters) for _ in range(2)]


def eval_before_backward(model, x):
    loss = loss_of(model.train()(x))
    model.eval()
    found = grad(loss, all_of(model, x))
    assert not any(module.training for module in model.modules())
    model.train()
    return found


def over_micro_batches(model, x):
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(2):
        for factor in (1, 2):
            loss_of(model(x.detach() * factor)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def single():
    return twice_differentiable(1, 0.0)


RUNS = {
    **{each.__name__: Run(each) for each in (of_parts, several_times, piled_up, of_several_shapes, while_streams_move)},
    "two_graphs_that_share_a_region": Run(two_graphs_that_share_a_region, lambda: Stack(2, p=0.0)),
    "one_region_twice_in_a_row": Run(one_region_twice_in_a_row),
    "batched": Run(batched, single),
    "batched_by_vmap": Run(batched_by_vmap, lambda: twice_differentiable(1)),
    **{each.__name__: Run(each) for each in (of_a_sum, transposed, read_outside_too, with_hooks, update_in_a_hook)},
    "with_hooks_inside": Run(with_hooks_inside, captured=False),
    **{each.__name__: Run(each) for each in (backward_in_a_hook, backward_in_its_own_hook)},
    "gradient_penalty": Run(gradient_penalty, twice_differentiable, captured=False),
    "on_other_weights": Run(on_other_weights),
    "functional": Run(functional, single, drops=False),
    "vmapped": Run(vmapped, single, drops=False),
    **{
        each.__name__: Run(each, single, drops=False, captured=False)
        for each in (directional, directional_in_parameters, directional_inside, hessian_product, jacobians)
    },
    **{each.__name__: Run(each) for each in (in_another_thread, eval_before_backward, over_micro_batches)},
    "by_replicas": Run(by_replicas, lambda: Stack(2, p=0.0)),
    "in torch's checkpoint": Run(in_torchs_checkpoint(reentrant=False), drops=False),
    "in torch's reentrant checkpoint": Run(in_torchs_checkpoint(reentrant=True), drops=False),
    "torch's reentrant checkpoint inside": Run(piled_up, with_torchs_checkpoint_inside, captured=False),
    "under_anomaly_detection": Run(under_anomaly_detection),
    "laid_out_in_one_storage": Run(laid_out_in_one_storage),
}
