"""What PyTorch itself trains with: its modules, parametrizations, functional transforms and optimizers; and MAML."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from small_models import Block, blocks, convolutions, image, llama, text
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from workload import STEPS, Run, adamw, seed, workload


def vectors(batch: int = 4, length: int = 8, width: int = 32) -> Tensor:
    return torch.randn(batch, length, width)


def squared(model: Callable[..., Tensor], batch: Callable[[], Tensor] = vectors) -> Callable[[], Tensor]:
    return lambda: model(batch()).pow(2).mean()


def define(name: str, make: Callable[[], nn.Module], batch: Callable[[], Tensor] = vectors) -> None:
    @workload("torch", name)
    def train(run: Run) -> None:
        model = run.govern(make())
        run.train(model, squared(model, batch))


def parametrized(how: Callable[..., nn.Module]) -> nn.Module:
    model = blocks()
    for block in model:
        how(block.up)
        how(block.down)
    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(0)) / 2


class Recurrent(nn.Module):
    """A recurrent layer with a norm around it: (batch, length, 32) -> the same."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.recurrent = nn.LayerNorm(32), kind(32, 32, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(self.norm(x))[0]


class Tied(nn.Module):
    """Two blocks that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].up.weight = self.layers[0].up.weight
        self.layers[1].down = self.layers[0].down

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LayerDrop(nn.Module):
    """Blocks, each of which is skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) > 0.4:
                x = layer(x)
        return x


class Router(nn.Module):
    """A mixture of experts by index_add, whose experts get other tokens in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 32)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        total = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            total = total.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return total.view_as(x)


class Quantizer(nn.Module):
    """Vector quantization between two blocks: a straight-through estimator, and a codebook that follows by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()
        self.register_buffer("codes", torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        chosen = torch.cdist(h.reshape(-1, 32), self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                counts = torch.bincount(chosen, minlength=16).clamp(min=1)
                sums = torch.zeros_like(self.codes).index_add_(0, chosen, h.reshape(-1, 32))
                self.codes.lerp_(sums / counts[:, None], 0.1)
        quantized = self.codes[chosen].view_as(h)
        return self.decoder(h + (quantized - h).detach()) + (h - quantized.detach()).pow(2)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(Block):
    """A block whose activation is an ``autograd.Function``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(StraightThrough.apply(self.up(self.norm(x))))


define("pre-norm blocks", blocks)
define("convolutions with batch norm", convolutions, image)
define("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2))
define("TransformerEncoder, norm first", lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False))
define("LSTM", lambda: nn.Sequential(*(Recurrent(nn.LSTM) for _ in range(2))))
define("GRU", lambda: nn.Sequential(*(Recurrent(nn.GRU) for _ in range(2))))
define("spectral norm", lambda: parametrized(parametrizations.spectral_norm))
define("spectral norm by a hook", lambda: parametrized(nn.utils.spectral_norm))
define("weight norm", lambda: parametrized(parametrizations.weight_norm))
define("weight norm by a hook", lambda: parametrized(nn.utils.weight_norm))
define("orthogonal weights", lambda: parametrized(parametrizations.orthogonal))
define(
    "a parametrization of one's own",
    lambda: parametrized(lambda linear: parametrize.register_parametrization(linear, "weight", Symmetric())),
)
define("weights that blocks share", Tied)
define("blocks that are skipped at random", LayerDrop)
define("a mixture of experts", lambda: nn.Sequential(Router(), Router()))
define("vector quantization with averages", Quantizer)
define("autograd.Function with a straight-through gradient", lambda: nn.Sequential(*(Binary() for _ in range(3))))
define("group norm and SiLU", lambda: nn.Sequential(*(grouped() for _ in range(2))), lambda: torch.randn(2, 8, 16, 16))


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)


def grouped() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))


@workload("torch", "TransformerDecoder with a mask")
def decoder(run: Run) -> None:
    model = run.govern(nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2))
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    run.train(model, lambda: model(vectors(), vectors(length=5), tgt_mask=mask).pow(2).mean())


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
