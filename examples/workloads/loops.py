"""Ways to train with PyTorch alone, beyond the plain loop: penalties, averages, closures, torch.func; and MAML."""

from __future__ import annotations

import copy

import torch
from small_models import blocks, convolutions, image, llama, squared, text, vectors
from torch import Tensor, nn
from torch.nn import functional
from workload import STEPS, Run, adamw, seed, workload


@workload("torch", "gradient accumulation and clipping")
def accumulation(run: Run) -> None:
    model = run.govern(llama())
    optimizer = adamw(model)
    for step in range(1, STEPS + 1):
        seed(step)
        for _ in range(3):
            (model(**text()).loss / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@workload("torch", "attention with dropout")
def attention_dropout(run: Run) -> None:
    model = run.govern(llama(attention_dropout=0.1))
    run.train(model, lambda: model(**text()).loss)


@workload("torch", "autocast to bfloat16")
def autocast(run: Run) -> None:
    model = run.govern(llama())

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**text()).loss

    run.train(model, loss)


@workload("torch", "lengths that change in each step")
def changing_lengths(run: Run) -> None:
    model = run.govern(llama())
    lengths = iter(range(40, 40 + 4 * STEPS, 4))
    run.train(model, lambda: model(**text(length=next(lengths))).loss)


@workload("torch", "gradient penalty and two optimizers (WGAN-GP)")
def gradient_penalty(run: Run) -> None:
    critic, generator = blocks(), blocks()
    model = run.govern(nn.ModuleDict({"critic": critic, "generator": generator}))
    of_critic, of_generator = adamw(critic), adamw(generator)
    for step in range(1, STEPS + 1):
        seed(step)
        real, fake = vectors(), generator(vectors()).detach()
        between = torch.lerp(fake, real, torch.rand(4, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).mean(-1).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        of_critic.step()
        model.zero_grad()
        (-critic(generator(vectors())).mean()).backward()
        of_generator.step()
        model.zero_grad()


@workload("torch", "a penalty on gradients by weights")
def hessian_penalty(run: Run) -> None:
    model = run.govern(blocks())

    def loss() -> Tensor:
        plain = squared(model)()
        gradients = torch.autograd.grad(plain, list(model.parameters()), create_graph=True)
        return plain + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)

    run.train(model, loss)


@workload("torch", "an average of the weights as teacher")
def average(run: Run) -> None:
    model = blocks()
    teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    run.govern(model)

    def loss() -> Tensor:
        teacher.update_parameters(model)
        batch = vectors()
        with torch.no_grad():
            target = teacher(batch)
        return (model(batch) - target).pow(2).mean()

    run.train(model, loss)


@workload("torch", "a momentum encoder that is a part of the model")
def momentum_encoder(run: Run) -> None:
    online = blocks()
    target = copy.deepcopy(online).requires_grad_(False)
    model = run.govern(nn.ModuleDict({"online": online, "target": target}))

    def loss() -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        one, other = (functional.normalize(each.mean(1), dim=-1) for each in (online(vectors()), target(vectors())))
        return functional.cross_entropy(one @ other.T / 0.2, torch.arange(4))

    run.train(model, loss)


@workload("torch", "two views by one encoder")
def two_views(run: Run) -> None:
    model = run.govern(convolutions())

    def loss() -> Tensor:
        one, other = (functional.normalize(model(image(16)).mean((2, 3)), dim=-1) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.2, torch.arange(2))

    run.train(model, loss)


@workload("torch", "several backwards through one graph")
def several_backwards(run: Run) -> None:
    model = run.govern(blocks())

    def loss() -> Tensor:
        out = model(vectors())
        out.abs().mean().backward(retain_graph=True)
        return out.pow(2).mean()

    run.train(model, loss)


@workload("torch", "LBFGS, whose closure runs several times")
def lbfgs(run: Run) -> None:
    model = run.govern(blocks())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(1, STEPS + 1):
        seed(step)
        batch = vectors()

        def closure(step: int = step, batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            seed(step)
            loss: Tensor = model(batch).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@workload("torch", "sharpness-aware minimization")
def sharpness_aware(run: Run) -> None:
    model = run.govern(blocks())
    optimizer = adamw(model)
    for step in range(1, STEPS + 1):
        seed(step)
        batch = vectors()
        model(batch).pow(2).mean().backward()
        with torch.no_grad():
            moves = [0.05 * each.grad / each.grad.norm() for each in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()


@workload("torch", "weights that change inside of backward")
def step_in_backward(run: Run) -> None:
    model = run.govern(blocks())

    def descend(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    run.train(model, squared(model))


@workload("torch", "frozen blocks with an unfrozen one between")
def frozen(run: Run) -> None:
    model = blocks(4)
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    run.govern(model)
    run.train(model, squared(model))


@workload("torch", "blocks that thaw one by one")
def thawing(run: Run) -> None:
    model = run.govern(blocks(4))
    optimizer = adamw(model)
    steps = iter(range(STEPS))

    def loss() -> Tensor:
        step = next(steps)
        for index, block in enumerate(model):
            block.requires_grad_(index >= 3 - step // 2)
        return squared(model)()

    run.train(model, loss, optimizer)


@workload("torch", "evaluation between steps")
def evaluation(run: Run) -> None:
    model = run.govern(convolutions())

    def loss() -> Tensor:
        model.eval()
        with torch.no_grad():
            model(image())
        return squared(model.train(), image)()

    run.train(model, loss)


@workload("torch", "an ensemble by torch.func")
def ensemble(run: Run) -> None:
    model = run.govern(blocks())
    weights = {
        name: nn.Parameter(torch.stack([value.detach() * scale for scale in (0.9, 1.0, 1.1)]))
        for name, value in model.named_parameters()
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)

    def one(values: dict[str, Tensor], batch: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (batch,)).pow(2).mean()

    def loss() -> Tensor:
        return torch.func.vmap(one, in_dims=(0, None), randomness="different")(weights, vectors()).sum()

    run.train(model, loss, optimizer)
    run.recording.note("weights: ", weights.items())


@workload("torch", "functional_call with weights made on the fly")
def functional_weights(run: Run) -> None:
    model = run.govern(blocks())
    shift = nn.Parameter(torch.tensor(0.01))
    optimizer = torch.optim.AdamW([*model.parameters(), shift], lr=1e-3)

    def loss() -> Tensor:
        weights = {name: value * (1 + shift) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, weights, (vectors(),)).pow(2).mean()

    run.train(model, loss, optimizer)
    run.recording.note("shift", [("", shift)])


@workload("torch", "per-sample gradients by torch.func")
def per_sample(run: Run) -> None:
    model = run.govern(blocks())
    optimizer = adamw(model)

    def one(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (sample[None],)).pow(2).mean()

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0), randomness="different")
    for step in range(1, STEPS + 1):
        seed(step)
        gradients = each({name: value.detach() for name, value in model.named_parameters()}, vectors())
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clamp(-1, 1).mean(0)
        optimizer.step()


@workload("torch", "teacher and student (distillation)")
def distillation(run: Run) -> None:
    student, teacher = llama(num_hidden_layers=1), llama()
    teacher.requires_grad_(False).eval()
    run.govern(student)

    def loss() -> Tensor:
        batch = text()
        with torch.no_grad():
            target = teacher(**batch).logits.softmax(-1)
        return functional.kl_div(student(**batch).logits.log_softmax(-1), target, reduction="batchmean")

    run.train(student, loss)


@workload("higher", "MAML")
def maml(run: Run) -> None:
    import higher

    model = run.govern(blocks())
    optimizer, inner = adamw(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        seed(step)
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, steps):
            for _ in range(2):
                steps.step(fast(vectors()).pow(2).mean())
            fast(vectors()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
