"""One table of what every op of recompute.kernels is: a row for each op and each form that it takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kernel_testing
import pytest
import torch
from kernel_testing import CAPPED, EAGER_ACTIVATIONS, eager_cross_entropy, eager_log_probs, eager_scores, make
from tiers import by_default
from torch.nn import functional as F

from recompute.kernels.cross_entropy import CrossEntropy, cross_entropy
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.layer_norm import add_layer_norm, layer_norm
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_divergence import linear_divergence
from recompute.kernels.linear_log_probs import linear_log_probs
from recompute.kernels.mlp import mlp
from recompute.kernels.rms_norm import add_rms_norm, rms_norm
from recompute.kernels.rope import rope
from recompute.kernels.swiglu import geglu, swiglu

M, H, I, V = 10, 257, 80, 300  # noqa: E741
EPS = 1e-6
Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Case:
    name: str
    op: Callable[..., Any]
    """Of tensors that all may be trained. It returns one tensor, or several."""
    eager: Callable[..., Any]
    shapes: Shapes
    """Those of the op's tensors, for M rows of H columns."""
    saved: Callable[[int, int], int]
    """How many elements of the dtype of the inputs are saved, for M and H."""
    saved_float32: int = 0
    """How many float32 are saved for each row."""
    saves_a_sum: bool = False
    """In the place of the inputs that are added."""
    kind: str = "norm"
    outputs: int = 1

    @property
    def has_linears(self):
        """Whether there are matrix products in it. Those ops record no recipe: it would run the products again."""
        return self.kind in ("mlp", "tiles", "head")

    def __str__(self):
        return self.name


def eager_rms_norm(casting):
    """As Hugging Face's Llama and Gemma, and PyTorch, have it."""

    def llama(x, weight=None):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return h if weight is None else weight * h

    def gemma(x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        h = x.to(wide) * torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + EPS)
        return (h * (1.0 + weight.to(wide))).type_as(x)

    def none(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    return {"llama": llama, "gemma": gemma, "none": none}[casting]


def eager_layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def norm_shapes(parameters):
    return lambda M, H: ((M, H), *[(H,)] * parameters)


def added(name, norm, op):
    """The norm of a sum, and the sum."""
    return replace(
        norm, name=name, op=op, eager=lambda x, y, *parameters: (norm.eager(x + y, *parameters), x + y),
        shapes=lambda M, H: ((M, H), *norm.shapes(M, H)), saves_a_sum=True, outputs=2,
    )  # fmt: skip


def alone(name, norm, op):
    """The norm of what is the stream already, and the stream."""
    return replace(
        norm, name=name, op=lambda x, *parameters: op(x, None, *parameters),
        eager=lambda x, *parameters: (norm.eager(x, *parameters), x.view_as(x)), outputs=2,
    )  # fmt: skip


_RMS = Case("rms_norm-llama", rms_norm, eager_rms_norm("llama"), norm_shapes(1), lambda M, H: M * H + H, 1)
_CAST = [
    replace(_RMS, name=f"rms_norm-{each}", op=partial(rms_norm, casting=each), eager=eager_rms_norm(each))
    for each in ("gemma", "none")
]
_LAYER = Case("layer_norm", layer_norm, eager_layer_norm, norm_shapes(2), lambda M, H: M * H + 2 * H, 2)
NORMS = [
    _RMS,
    *_CAST,
    replace(_RMS, name="rms_norm-without-weight", shapes=norm_shapes(0), saved=lambda M, H: M * H),
    added("add_rms_norm", _RMS, add_rms_norm),
    *(added(f"add_{each.name}", each, partial(add_rms_norm, **each.op.keywords)) for each in _CAST),
    alone("add_rms_norm-without-residual", _RMS, add_rms_norm),
    _LAYER,
    replace(_LAYER, name="layer_norm-without-bias", shapes=norm_shapes(1), saved=lambda M, H: M * H + H),
    replace(
        _LAYER, name="layer_norm-without-weight", op=lambda x, bias: layer_norm(x, None, bias),
        # With ones: on CUDA PyTorch's own fails in a second backward without a weight.
        eager=lambda x, bias: eager_layer_norm(x, torch.ones_like(bias), bias), shapes=norm_shapes(1),
        saved=lambda M, H: M * H + H,
    ),
    replace(_LAYER, name="layer_norm-without-both", shapes=norm_shapes(0), saved=lambda M, H: M * H),
    added("add_layer_norm", _LAYER, add_layer_norm),
    alone("add_layer_norm-without-residual", _LAYER, add_layer_norm),
]  # fmt: skip


def eager_glu(activation):
    def glu(gate, up=None):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return EAGER_ACTIVATIONS[activation](gate) * up

    return glu


_GLU = Case("swiglu", swiglu, eager_glu("silu"), lambda M, H: ((M, H), (M, H)), lambda M, H: 2 * M * H, kind="product")
_EXACT = partial(geglu, approximate="none")
PRODUCTS = [
    _GLU,
    replace(_GLU, name="geglu", op=geglu, eager=eager_glu("gelu_tanh")),
    replace(_GLU, name="geglu-exact", op=_EXACT, eager=eager_glu("gelu")),
]
PRODUCTS += [replace(each, name=f"{each}-packed", shapes=lambda M, H: ((M, 2 * H),)) for each in PRODUCTS]

MLP_NAMES = {
    "gated": ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
    "packed": ("gate_weight", "down_weight", "gate_bias", "down_bias"),
    "ungated": ("up_weight", "down_weight", "up_bias", "down_bias"),
}


def mlp_case(name, form, activation, biases=False, **options):
    names = MLP_NAMES[form]
    widths = {each: (2 * I if form == "packed" else I) for each in names if each.startswith(("gate", "up"))}

    def shapes(M, H):
        weights = [(widths[each], H) if each in widths else (H, I) for each in names if "weight" in each]
        return ((M, H), *weights, *((weight[0],) for weight in weights if biases))

    def op(x, *parameters):
        given = dict(zip(names, parameters, strict=False))
        if form == "packed":
            given["up_weight"] = None
        return (mlp if form == "ungated" else gated_mlp)(x, **given, activation=activation, **options)

    def eager(x, *parameters):
        given = dict.fromkeys(MLP_NAMES["gated"]) | dict(zip(names, parameters, strict=False))
        first = "up" if form == "ungated" else "gate"
        gate = F.linear(x, given[f"{first}_weight"], given[f"{first}_bias"])
        if form == "ungated":
            product = EAGER_ACTIVATIONS[activation](gate)
        else:
            up = () if form == "packed" else (F.linear(x, given["up_weight"], given["up_bias"]),)
            product = eager_glu(activation)(gate, *up)
        return F.linear(product, given["down_weight"], given["down_bias"])

    def saved(M, H):
        inner = 0 if "tile" in options else I if form == "ungated" else 2 * I
        return sum(torch.Size(shape).numel() for shape in shapes(M, H)) + M * inner

    return Case(name, op, eager, shapes, saved, kind="tiles" if "tile" in options else "mlp")


MLPS = [
    mlp_case("gated_mlp", "gated", "silu"),
    mlp_case("gated_mlp-biases", "gated", "gelu_tanh", biases=True),
    mlp_case("gated_mlp-packed", "packed", "gelu"),
    mlp_case("gated_mlp-packed-biases", "packed", "silu", biases=True),
    mlp_case("mlp", "ungated", "gelu", biases=True),
    *(mlp_case(f"mlp-{each}", "ungated", each) for each in EAGER_ACTIVATIONS if each != "gelu"),
]
TILES = [
    mlp_case("gated_mlp-tiles", "gated", "silu", biases=True, tile=4),
    mlp_case("mlp-tiles", "ungated", "gelu_tanh", biases=True, tile=4),
]
"""They round at each tile what others round once."""


def angles(x, rotated):
    """Cos and sin whose halves are not equal, for x: (…, S, D)."""
    positions, columns = (torch.arange(size, device=x.device) for size in (x.shape[-2], rotated))
    angle = (positions[:, None] + 0.3) * (columns + 0.7)
    return [angle.cos()[None].to(x.dtype), angle.sin()[None].to(x.dtype)]


def eager_rope(q, k, cos, sin, unsqueeze_dim=1):
    """As Hugging Face's models have it, in the form that takes angles for the first columns alone."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotated = cos.shape[-1]

    def rotate(x):
        x, rest = x[..., :rotated], x[..., rotated:]
        half = torch.cat((-x[..., rotated // 2 :], x[..., : rotated // 2]), -1)
        y = x * cos + half * sin
        return torch.cat((y, rest), -1) if rest.shape[-1] else y

    return rotate(q), rotate(k)


def rope_case(name, rest):
    def of(function):
        return lambda q, k: function(q, k, *angles(q, q.shape[-1] - rest))

    def shapes(M, H):
        return (2, 4, M, width(H)), (2, 1, M, width(H))

    def saved(M, H):
        return 2 * M * (width(H) - rest)

    def width(H):
        return max(H // 8 * 2, 4)

    return Case(name, of(rope), of(eager_rope), shapes, saved, kind="rope", outputs=2)


ROPES = [rope_case("rope", 0), rope_case("rope-of-some-columns", 2)]


def target_of(logits, classes):
    target = torch.arange(logits.shape[:-1].numel(), device=logits.device) * 7 % classes
    target[::5] = -100
    return target.view(logits.shape[:-1])


EXTRAS = ("return_token_accuracy", "return_argmax", "return_max_logit")


def loss_case(name, **options):
    own = ("logits_bytes", "hold_logits")
    eager = {key: value for key, value in options.items() if key not in own and not key.startswith("return")}
    if name.startswith("cross"):
        return Case(
            name,
            lambda logits: cross_entropy(logits, target_of(logits, logits.shape[-1]), **options),
            lambda logits: eager_cross_entropy(logits, target_of(logits, logits.shape[-1]), **eager),
            lambda M, H: ((M, H),),
            lambda M, H: M * H,
            saved_float32=2,
            kind="loss",
        )

    def op(x, weight, bias):
        found = linear_cross_entropy(x, weight, target_of(x, len(weight)), bias, **options)
        return found.loss if isinstance(found, CrossEntropy) else found

    return Case(
        name,
        op,
        lambda x, weight, bias: eager_cross_entropy(F.linear(x, weight, bias), target_of(x, len(weight)), **eager),
        lambda M, H: ((M, H), (V, H), (V,)),
        lambda M, H: M * H + V * H + V,
        saved_float32=2,
        kind="head",
    )


def log_probs_case(name, words=None, **options):
    """words: how many each token asks for; None for one."""
    eager = {key: value for key, value in options.items() if key != "logits_bytes"}
    entropy = options.get("entropy", False)

    def target(x):
        if words is None:
            return target_of(x, V)
        return target_of(x[..., :1].expand(*x.shape[:-1], words)[..., None], V)

    return replace(
        loss_case(name),
        op=lambda x, weight, bias: linear_log_probs(x, weight, target(x), bias, **options),
        eager=lambda x, weight, bias: eager_log_probs(F.linear(x, weight, bias), target(x), **eager),
        saved_float32=2 + entropy,
        outputs=1 + entropy,
    )


def divergence_case(name, kind, logits_bytes=0, **options):
    beside = {f"{who}_{key}": value for key, value in options.items() for who in ("student", "teacher")}
    temperature = {"temperature": 0.7}

    def teacher(x, weight):
        """Numbers that every dtype has."""
        shapes = (*x.shape[:-1], 24), (V, 24)
        made = (torch.arange(math.prod(shape), device=x.device).view(shape) * 37 % 101 / 64 - 0.75 for shape in shapes)
        hidden, head = (each.to(like) for each, like in zip(made, (x, weight), strict=True))
        return hidden, head

    def op(x, weight, bias):
        given = {"student_bias": bias, "kind": kind, "beta": 0.3, "logits_bytes": logits_bytes}
        return linear_divergence(x, weight, *teacher(x, weight), **given, **temperature, **beside)

    def eager(x, weight, bias):
        logits = F.linear(x, weight, bias), F.linear(*teacher(x, weight))
        scores = (eager_scores(each, **options, **temperature) for each in logits)
        return kernel_testing.eager_divergence(*scores, kind, 0.3)

    saved = lambda M, H: M * H + V * H + V + 24 * (M + V)  # noqa: E731
    return replace(loss_case(name), op=op, eager=eager, saved=saved, saved_float32=5)


LOSSES = [
    loss_case("cross_entropy"),
    loss_case("cross_entropy-options", **CAPPED),
    loss_case("linear_cross_entropy", logits_bytes=0, hold_logits=False),
    loss_case("linear_cross_entropy-held", logits_bytes=3 * 256 * M * 4),
    loss_case("linear_cross_entropy-options", logits_bytes=0, **CAPPED),
    loss_case("linear_cross_entropy-extras", logits_bytes=0, hold_logits=False, **dict.fromkeys(EXTRAS, True)),
    log_probs_case("linear_log_probs", logits_bytes=0),
    log_probs_case("linear_log_probs-entropy", logits_bytes=0, entropy=True, temperature=0.7, softcap=5.0),
    log_probs_case("linear_log_probs-words", words=3, scale=1.5),
    log_probs_case("linear_log_probs-words-entropy", words=3, logits_bytes=0, entropy=True),
    divergence_case("linear_divergence-forward_kl", "forward_kl"),
    divergence_case("linear_divergence-reverse_kl", "reverse_kl", softcap=5.0),
    divergence_case("linear_divergence-jsd", "jsd", scale=1.5),
    divergence_case("linear_divergence-jsd-whole", "jsd", logits_bytes=None),
    divergence_case("linear_divergence-total_variation", "total_variation"),
]
WITH_LOGITS = loss_case("linear_cross_entropy-logits", return_logits=True)
"""Its head is a plain one."""

CASES = [*NORMS, *PRODUCTS, *MLPS, *TILES, *ROPES, *LOSSES]
_EACH_OP = (
    *("rms_norm-llama", "add_rms_norm", "add_rms_norm-without-residual"),
    *("layer_norm", "add_layer_norm", "swiglu", "swiglu-packed", "geglu", "gated_mlp", "gated_mlp-packed-biases"),
    *("gated_mlp-tiles", "mlp", "rope-of-some-columns", "cross_entropy-options", "linear_cross_entropy"),
    *("linear_log_probs-words-entropy", "linear_divergence-jsd"),
)
"""Each op and form once; the others differ in a convention or an argument."""
KINDS = (
    *("rms_norm-llama", "add_layer_norm", "swiglu-packed", "gated_mlp", "mlp", "rope", "cross_entropy"),
    *("linear_cross_entropy-extras", "linear_cross_entropy-logits", "linear_log_probs-entropy"),
    "linear_divergence-jsd",
)


def each_case(*cases, default=_EACH_OP):
    """Over these cases, or all: those of the default tier, and the others, which are slow."""
    named = {str(case): case for case in cases or CASES}
    return pytest.mark.parametrize("case", by_default(named, *(name for name in default if name in named)))


each_kind = each_case(*CASES, WITH_LOGITS, default=KINDS)
each_norm = pytest.mark.parametrize("case", NORMS, ids=str)
HEADS = [case for case in LOSSES if case.has_linears and case.outputs == 1]
each_linear = each_case(*MLPS, *TILES, *HEADS)
"""Ops with matrix products in them."""


def inputs_of(case, device="cpu", dtype=torch.float32, rows=M, columns=H):
    """The op's tensors, all trained. Weights of Linears are as small as those of models."""
    made = []
    for seed, shape in enumerate(case.shapes(rows, columns)):
        is_weight = case.has_linears and seed and len(shape) == 2
        made.append(make(*shape, seed=seed).mul(shape[-1] ** -0.5 if is_weight else 1.0))
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]
