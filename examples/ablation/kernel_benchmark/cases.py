"""What is measured of each op, and on which inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from kernel_benchmark.ways import KINDS, OURS, WAYS, Function, Load, Tensors
from torch import Generator, Tensor
from torch._functorch import config as functorch_config

Size = tuple[int, ...]
Prepare = Callable[[Tensors], Callable[[], Tensors]]
"""Takes an op's inputs, and returns the call to time."""

DTYPE = torch.bfloat16


def forward(load: Load) -> Prepare:
    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        function = load()
        return lambda: as_tuple(function(*inputs))

    return prepare


def backward(load: Load) -> Prepare:
    """Backward as autograd runs it, repeated after one forward, for the inputs that require gradients."""

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        with functorch_config.patch(donated_buffer=False):  # otherwise torch.compile refuses retain_graph
            outputs = as_tuple(load()(*inputs))
        return partial(gradients, outputs, inputs, draw_gradients(outputs), retain_graph=True)

    return prepare


@dataclass
class Step:
    """Forward and backward. `between` is called when forward has returned and backward has not begun."""

    function: Function
    inputs: Tensors
    of_outputs: Tensors

    def __call__(self, between: Callable[[Tensors], None] = lambda outputs: None) -> Tensors:
        outputs = as_tuple(self.function(*self.inputs))
        between(outputs)
        found = gradients(outputs, self.inputs, self.of_outputs)
        return *(output.detach() for output in outputs), *found


def step(load: Load) -> Prepare:
    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        function = load()
        return Step(function, inputs, draw_gradients(as_tuple(function(*inputs))))

    return prepare


def backward_with(load: Load, regenerate: Prepare) -> Prepare:
    """Forward's op again, and then backward: in this order, since some backwards write into what was saved."""

    def prepare(inputs: Tensors) -> Callable[[], Tensors]:
        first, second = regenerate(inputs), backward(load)(inputs)

        def call() -> Tensors:
            output = first()
            return *second(), *output

        return call

    return prepare


def swiglu_backward_with_product(inputs: Tensors) -> Callable[[], Tensors]:
    run = import_module("recompute.kernels.activation").GLU.backward
    gate, up = (tensor.detach() for tensor in inputs)
    return partial(run, *draw_gradients((gate,)), gate, None, up, None, 0, "silu", True, True, True)


def as_tuple(results: Tensor | Sequence[Tensor]) -> Tensors:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def gradients(outputs: Tensors, inputs: Tensors, of_outputs: Tensors, retain_graph: bool = False) -> Tensors:
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(outputs, wanted, of_outputs, retain_graph=retain_graph)


def draw_gradients(outputs: Tensors) -> Tensors:
    """The same values and layout for every way; 1 for a loss."""
    generator = Generator(outputs[0].device).manual_seed(1)
    drawn = (normal(generator, *output.shape) if output.dim() else torch.ones_like(output) for output in outputs)
    return tuple(torch.empty_like(output).copy_(values) for output, values in zip(outputs, drawn, strict=True))


def normal(generator: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).mul_(scale).to(DTYPE)


def leaves(*tensors: Tensor) -> Tensors:
    return tuple(tensor.requires_grad_() for tensor in tensors)


def draw_norm(generator: Generator, tokens: int, hidden: int) -> Tensors:
    return leaves(normal(generator, tokens, hidden), normal(generator, hidden))


def draw_add_norm(generator: Generator, tokens: int, hidden: int) -> Tensors:
    return *leaves(normal(generator, tokens, hidden)), *draw_norm(generator, tokens, hidden)


def draw_layer_norm(generator: Generator, tokens: int, hidden: int) -> Tensors:
    return *draw_norm(generator, tokens, hidden), *leaves(normal(generator, hidden))


def draw_add_layer_norm(generator: Generator, tokens: int, hidden: int) -> Tensors:
    return *leaves(normal(generator, tokens, hidden)), *draw_layer_norm(generator, tokens, hidden)


def draw_product(generator: Generator, tokens: int, intermediate: int) -> Tensors:
    return leaves(normal(generator, tokens, intermediate), normal(generator, tokens, intermediate))


def draw_heads(generator: Generator, heads: int, kv_heads: int, tokens: int, head: int) -> Tensors:
    q, k = (normal(generator, 1, tokens, n, head).transpose(1, 2) for n in (heads, kv_heads))
    inverse = 1e4 ** (-torch.arange(0, head, 2, device=generator.device) / head)
    angles = torch.arange(tokens, device=generator.device)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)[None]
    return *leaves(q, k), angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def draw_weights(generator: Generator, *shapes: Size) -> Tensors:
    return leaves(*(normal(generator, *shape, scale=0.02) for shape in shapes))


def draw_mlp(generator: Generator, tokens: int, hidden: int, intermediate: int) -> Tensors:
    shapes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    return *leaves(normal(generator, tokens, hidden)), *draw_weights(generator, *shapes)


def draw_ungated_mlp(generator: Generator, tokens: int, hidden: int, intermediate: int) -> Tensors:
    weights = draw_weights(generator, (intermediate, hidden), (hidden, intermediate))
    biases = leaves(normal(generator, intermediate), normal(generator, hidden))
    return *leaves(normal(generator, tokens, hidden)), *weights, *biases


def draw_logits(generator: Generator, tokens: int, hidden: int, vocabulary: int) -> Tensors:
    target = torch.randint(vocabulary, (tokens,), generator=generator, device=generator.device)
    return *leaves(normal(generator, tokens, hidden)), *draw_weights(generator, (vocabulary, hidden)), target


def draw_teacher_too(generator: Generator, tokens: int, hidden: int, vocabulary: int) -> Tensors:
    student, weight, _ = draw_logits(generator, tokens, hidden, vocabulary)
    teacher, teacher_weight, _ = draw_logits(generator, tokens, hidden, vocabulary)
    return student, weight, teacher.detach(), teacher_weight.detach()


@dataclass(frozen=True)
class Measure:
    """What is timed of an op: by its size, the elements that it has to move, or the flops of its matrix products."""

    name: str
    results: tuple[str, ...]
    ways: Mapping[str, Prepare]
    elements: Callable[..., int] | None = None
    flops: Callable[..., int] | None = None
    holds: bool = False  # bytes a token for backward, of which the others' tell nothing


@dataclass(frozen=True)
class Benchmark:
    draw: Callable[..., Tensors]
    measures: tuple[Measure, ...]
    sizes: tuple[Size, ...]
    small: Size
    compiled: Collection[Size]  # at which torch.compile takes part: it takes long

    def inputs(self, device: torch.device, size: Size, seed: int) -> Tensors:
        return self.draw(Generator(device).manual_seed(seed), *size)


def times(count: int) -> Callable[..., int]:
    return lambda *size: count * math.prod(size)


def heads_and_angles(heads: int, kv_heads: int, tokens: int, head: int) -> int:
    return (2 * heads + 2 * kv_heads + 2) * tokens * head


def each(direction: Callable[[Load], Prepare], name: str) -> dict[str, Prepare]:
    return {way: direction(load) for way, load in WAYS[name].items()}


SWIGLU_AGAIN = {way: backward_with(load, forward(load)) for way, load in WAYS["swiglu"].items()}

BENCHMARKS = {
    "rms_norm": Benchmark(
        draw_norm,
        (
            Measure("forward", ("y",), each(forward, "rms_norm"), elements=times(2)),
            Measure("backward", ("dx", "dweight"), each(backward, "rms_norm"), elements=times(3)),
        ),
        sizes=((16384, 1024), (16384, 2048), (16384, 4096), (8192, 5120), (8192, 8192), (4096, 16384)),
        small=(64, 128),
        compiled=((16384, 4096),),
    ),
    "add_rms_norm": Benchmark(
        draw_add_norm,
        (
            Measure("forward", ("y", "sum"), each(forward, "add_rms_norm"), elements=times(4)),
            Measure(
                "backward",
                ("dx", "dresidual", "dweight"),
                each(backward, "add_rms_norm"),
                elements=times(4),
            ),
        ),
        sizes=((16384, 4096), (8192, 8192)),
        small=(64, 128),
        compiled=((16384, 4096),),
    ),
    "layer_norm": Benchmark(
        draw_layer_norm,
        (
            Measure("forward", ("y",), each(forward, "layer_norm"), elements=times(2)),
            Measure("backward", ("dx", "dweight", "dbias"), each(backward, "layer_norm"), elements=times(3)),
        ),
        sizes=((32768, 768), (16384, 1024), (16384, 1600), (16384, 4096), (8192, 8192), (4096, 16384)),
        small=(32, 128),  # on the CPU PyTorch sums the parameters' gradients in bfloat16
        compiled=((16384, 4096),),
    ),
    "add_layer_norm": Benchmark(
        draw_add_layer_norm,
        (
            Measure("forward", ("y", "sum"), each(forward, "add_layer_norm"), elements=times(4)),
            Measure(
                "backward",
                ("dx", "dresidual", "dweight", "dbias"),
                each(backward, "add_layer_norm"),
                elements=times(4),
            ),
        ),
        sizes=((32768, 768), (16384, 4096), (8192, 8192)),
        small=(32, 128),
        compiled=((16384, 4096),),
    ),
    "swiglu": Benchmark(
        draw_product,
        (
            Measure("forward", ("product",), each(forward, "swiglu"), elements=times(3)),
            Measure("backward", ("dgate", "dup"), each(backward, "swiglu"), elements=times(5)),
            Measure(
                "backward, and product again",
                ("dgate", "dup", "product"),
                {**SWIGLU_AGAIN, OURS: swiglu_backward_with_product},
                elements=times(6),
            ),
        ),
        sizes=((16384, 8192), (8192, 14336)),
        small=(64, 256),
        compiled=((8192, 14336),),
    ),
    "geglu": Benchmark(
        draw_product,
        (
            Measure("forward", ("product",), each(forward, "geglu"), elements=times(3)),
            Measure("backward", ("dgate", "dup"), each(backward, "geglu"), elements=times(5)),
        ),
        sizes=((16384, 8192),),
        small=(64, 256),
        compiled=((16384, 8192),),
    ),
    "rope": Benchmark(
        draw_heads,
        (
            Measure("forward", ("q", "k"), each(forward, "rope"), elements=heads_and_angles),
            Measure("backward", ("dq", "dk"), each(backward, "rope"), elements=heads_and_angles),
        ),
        sizes=((32, 8, 8192, 128),),
        small=(4, 2, 32, 64),
        compiled=((32, 8, 8192, 128),),
    ),
    "gated_mlp": Benchmark(
        draw_mlp,
        (
            Measure(
                "forward + backward",
                ("y", "dx", "dgate_weight", "dup_weight", "ddown_weight"),
                each(step, "gated_mlp"),
                flops=times(18),
                holds=True,
            ),
        ),
        sizes=((8192, 4096, 14336),),
        small=(64, 128, 256),
        compiled=((8192, 4096, 14336),),
    ),
    "mlp": Benchmark(
        draw_ungated_mlp,
        (
            Measure(
                "forward + backward",
                ("y", "dx", "dup_weight", "ddown_weight", "dup_bias", "ddown_bias"),
                each(step, "mlp"),
                flops=times(12),
                holds=True,
            ),
        ),
        sizes=((8192, 4096, 16384), (16384, 1600, 6400)),
        small=(64, 128, 256),
        compiled=((8192, 4096, 16384),),
    ),
    "linear_cross_entropy": Benchmark(
        draw_logits,
        (
            Measure(
                "forward + backward",
                ("loss", "dhidden", "dweight"),
                each(step, "linear_cross_entropy"),
                flops=times(6),
            ),
        ),
        sizes=((8192, 4096, 128256), (16384, 2048, 128256), (8192, 1024, 151936), (8192, 4096, 151936)),
        small=(64, 128, 512),
        compiled=((8192, 4096, 128256), (16384, 2048, 128256), (8192, 1024, 151936), (8192, 4096, 151936)),
    ),
    **{
        name: Benchmark(
            draw,
            (Measure("forward + backward", (*results, "dhidden", "dweight"), each(step, name), flops=times(flops)),),
            sizes=((8192, 4096, 151936),),
            small=(64, 128, 512),
            compiled=((8192, 4096, 151936),),
        )
        for name, draw, results, flops in (
            ("linear_log_probs", draw_logits, ["log_probs"], 6),
            ("linear_log_probs_and_entropy", draw_logits, ["log_probs", "entropies"], 6),
            *((f"linear_{kind}", draw_teacher_too, ["divergence"], 8) for kind in KINDS),
        )
    },
}
