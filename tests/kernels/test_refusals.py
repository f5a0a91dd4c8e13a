"""What each op refuses, and what it says: the argument, what was found, and what is expected."""

import re

import pytest
import torch

from recompute.errors import KernelError
from recompute.kernels.blockwise_8bit import dequantize_blockwise, quantize_blockwise, quantize_blockwise_with_error
from recompute.kernels.cross_entropy import cross_entropy
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.layer_norm import add_layer_norm, layer_norm
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_divergence import linear_divergence
from recompute.kernels.linear_log_probs import linear_log_probs
from recompute.kernels.mlp import mlp
from recompute.kernels.rms_norm import add_rms_norm, rms_norm
from recompute.kernels.rope import rope
from recompute.kernels.swiglu import geglu, glu_backward_from_codes, swiglu

ones = torch.ones
ROWS, META, INTS = ones(2, 4), ones(2, 4, device="meta"), ones(2, 4, dtype=torch.int32)
SQUARE, ROW, NARROW = ones(3, 3), ones(3), ones(3, 3, dtype=torch.bfloat16)
CLASSES = torch.zeros(2, dtype=torch.long)
HEAD = (ROWS, ones(3, 4), CLASSES)


def rotated(**changes):
    shapes = {"q": (2, 4, 5, 16), "k": (2, 2, 5, 16), "cos": (1, 5, 16), "sin": (1, 5, 16)}
    return rope(**{name: ones(shape) for name, shape in shapes.items()} | changes)


def from_codes(**changes):
    codes = [each for _ in range(2) for each in quantize_blockwise(ones(5, 96), 32)]
    given = dict(zip(("gate", "gate_scales", "up", "up_scales"), codes, strict=True))
    return glu_backward_from_codes(**{"dproduct": ones(5, 96), **given, "activation": "silu", "block": 32} | changes)


def loss(*arguments, **options):
    return linear_cross_entropy(*(arguments or HEAD), **options)


def log_probs(*arguments, **options):
    return linear_log_probs(*(arguments or HEAD), **options)


CODES, SCALES = quantize_blockwise(ones(4, 64), 128)


def decoded(codes=CODES, scales=SCALES, dtype=torch.float32, block=128):
    return dequantize_blockwise(codes, scales, dtype, block)


TEACHER = (ones(2, 5), ones(3, 5))
WORDS = {"teacher_indices": torch.zeros(2, 5, dtype=torch.long)}


def divergence(*teacher, **options):
    return linear_divergence(ROWS, HEAD[1], *(teacher or TEACHER), **options)


REFUSED = [
    (lambda: rms_norm(ROWS, ROW), "rms_norm: weight has shape (3,); expected (4,) for x of shape (2, 4)"),
    (lambda: rms_norm(ROWS, ones(1, 4)), "weight has shape (1, 4)"),
    (lambda: rms_norm(torch.tensor(1.0)), "no dimension to normalize over"),
    (lambda: rms_norm(INTS), "x is torch.int32; expected one of torch.float16"),
    (lambda: rms_norm(ROWS.to(torch.complex64)), "x is torch.complex64"),
    (lambda: rms_norm(ROWS, INTS[0]), "weight is torch.int32"),
    (lambda: rms_norm(ROWS, META[0]), "x is on cpu and weight on meta; expected one device"),
    (lambda: rms_norm(ROWS, [1.0] * 4), "weight is list; expected a Tensor"),
    (lambda: rms_norm(None, ROWS[0]), "x is NoneType; expected a Tensor"),
    (lambda: rms_norm(ROWS, None, 1e-6, "lama"), "unknown casting 'lama'; expected one of llama, gemma, none"),
    (lambda: rms_norm(ROWS, None, 1e-6, "layer_norm"), "unknown casting 'layer_norm'"),
    (lambda: add_rms_norm(ROWS, ROWS[0]), "add_rms_norm: x has shape (2, 4) and residual (4,); expected the same"),
    (lambda: add_rms_norm(ROWS, None, ROW), "add_rms_norm: weight has shape (3,)"),
    (lambda: add_rms_norm(ROWS, INTS), "residual is torch.int32"),
    (lambda: add_rms_norm(ROWS, META), "x is on cpu and residual on meta"),
    (lambda: add_rms_norm(ROWS, None, None, 1e-6, "lama"), "add_rms_norm: unknown casting 'lama'"),
    (lambda: layer_norm(ROWS, ROW), "layer_norm: weight has shape (3,); expected (4,) for x of shape (2, 4)"),
    (lambda: layer_norm(ROWS, None, ones(1, 4)), "bias has shape (1, 4); expected (4,)"),
    (lambda: layer_norm(torch.tensor(1.0)), "no dimension to normalize over"),
    (lambda: layer_norm(ROWS, None, META[0]), "x is on cpu and bias on meta"),
    (lambda: add_layer_norm(ROWS, ROWS[0]), "add_layer_norm: x has shape (2, 4) and residual (4,)"),
    (lambda: add_layer_norm(ROWS, None, ROWS[0], ROW), "add_layer_norm: bias has shape (3,)"),
    (lambda: swiglu(ones(2, 3), ROW), "swiglu: gate has shape (2, 3) and up (3,)"),
    (lambda: geglu(ROWS, INTS), "geglu: up is torch.int32"),
    (lambda: swiglu(META, ROWS), "gate is on meta and up on cpu"),
    (lambda: swiglu(ones(2, 3)), "swiglu: gate has shape (2, 3); expected (..., 2 · I)"),
    (lambda: geglu(torch.tensor(1.0)), "geglu: gate has shape ()"),
    (lambda: geglu(ROWS, ROWS, "erf"), "unknown approximate 'erf'; expected one of tanh, none"),
    (lambda: from_codes(activation="relu"), "unknown activation 'relu'; expected one of silu, gelu, gelu_tanh"),
    (lambda: from_codes(dproduct=ones(5, 96).double()), "dproduct is torch.float64"),
    (lambda: from_codes(dproduct=ones(5, 95)), "has shape (5, 95), gate (5, 96) and up (5, 96); expected (..., I)"),
    (lambda: from_codes(up=None, up_scales=None), "gate (5, 96) and up None; expected (..., I) for all three, or gate"),
    (lambda: from_codes(up=None), "neither up nor its scales"),
    (lambda: from_codes(up_scales=None), "neither up nor its scales"),
    (lambda: from_codes(dproduct=ones(5, 96, device="meta")), "dproduct is on meta and gate on cpu"),
    (lambda: from_codes(block=64), "scales are torch.float32 of shape (15,); expected float32 (8,)"),
    (lambda: from_codes(gate=ones(5, 96)), "glu_backward_from_codes: the dtype of codes is torch.float32"),
    (lambda: quantize_blockwise(ones(2).double()), "quantize_blockwise: x is torch.float64; expected one of"),
    (lambda: quantize_blockwise_with_error(INTS), "x is torch.int32"),
    (lambda: quantize_blockwise(ones(2), 96), "block is 96; expected a power of 2 from 1 to 4096"),
    (lambda: quantize_blockwise(ones(2), 8192), "block is 8192"),
    (lambda: quantize_blockwise(ones(2), 0), "block is 0"),
    (lambda: quantize_blockwise(ones(2), format="fp4"), "unknown format 'fp4'; expected one of fp8, int8"),
    (lambda: decoded(dtype=torch.float64), "dequantize_blockwise: dtype is torch.float64"),
    (lambda: decoded(ones(4, 64)), "the dtype of codes is torch.float32; expected one of"),
    (lambda: decoded(block=64), "shape (2,); expected float32 (4,), contiguous,"),
    (lambda: decoded(scales=SCALES.to("meta")), "codes are on cpu and scales on meta"),
    (lambda: decoded(CODES[:, ::2], ones(1)), "strides (64, 2); expected dense"),
    (lambda: gated_mlp(ROWS, *[SQUARE] * 3), "gated_mlp: expected x (..., H), gate_weight and up_weight (I, H), or"),
    (lambda: gated_mlp(ROWS, *[SQUARE] * 3), "found x (2, 4), gate_weight (3, 3)"),
    (lambda: gated_mlp(SQUARE, SQUARE, ones(2, 3), SQUARE), "up_weight (2, 3)"),
    (lambda: gated_mlp(SQUARE, SQUARE, SQUARE, ones(3, 2)), "down_weight (3, 2)"),
    (lambda: gated_mlp(SQUARE, SQUARE, None, SQUARE), "or gate_weight (2 · I, H) and no up_weight"),
    (lambda: gated_mlp(torch.tensor(1.0), *[SQUARE] * 3), "found x ()"),
    (lambda: gated_mlp(SQUARE, SQUARE, SQUARE, ROW), "down_weight (3,)"),
    (lambda: gated_mlp(SQUARE.to("meta"), *[SQUARE] * 3), "x is on meta and gate_weight on cpu"),
    (lambda: gated_mlp(SQUARE.long(), *[SQUARE] * 3), "x is torch.int64"),
    (lambda: gated_mlp(SQUARE.half(), *[SQUARE] * 3), "x torch.float16, gate_weight torch.float32"),
    (lambda: gated_mlp(*[SQUARE] * 4, "relu"), "unknown activation 'relu'; expected one of silu, gelu, gelu_tanh."),
    (lambda: gated_mlp(*[SQUARE] * 4, gate_bias=SQUARE), "gate_bias (3, 3)"),
    (lambda: gated_mlp(*[SQUARE] * 4, up_bias=ones(2)), "up_bias (2,)"),
    (lambda: gated_mlp(*[SQUARE] * 4, down_bias=ones(2)), "down_bias (2,)"),
    (lambda: gated_mlp(SQUARE, ones(6, 3), None, SQUARE, gate_bias=ROW), "gate_bias (3,)"),
    (lambda: gated_mlp(SQUARE, ones(6, 3), None, SQUARE, gate_bias=ones(6), up_bias=ROW), "up_bias (3,)"),
    (lambda: gated_mlp(*[SQUARE] * 4, gate_bias=ROW.double()), "gate_bias torch.float64"),
    (lambda: gated_mlp(*[SQUARE] * 4, tile=0), "gated_mlp: tile is 0; expected at least 1 token, or None"),
    (lambda: mlp(ROWS, SQUARE, SQUARE), "mlp: expected x (..., H), up_weight (I, H), down_weight (O, I), and biases"),
    (lambda: mlp(ROWS, SQUARE, SQUARE), "found x (2, 4), up_weight (3, 3)"),
    (lambda: mlp(SQUARE, ones(2, 3), SQUARE), "up_weight (2, 3)"),
    (lambda: mlp(SQUARE, SQUARE, ones(3, 2)), "down_weight (3, 2)"),
    (lambda: mlp(*[SQUARE] * 3, up_bias=SQUARE), "up_bias (3, 3)"),
    (lambda: mlp(*[SQUARE] * 3, down_bias=ones(2)), "down_bias (2,)"),
    (lambda: mlp(*[SQUARE] * 3, "tanh"), "unknown activation 'tanh'; expected one of silu, gelu, gelu_tanh, quick"),
    (lambda: mlp(*[SQUARE] * 3, tile=0), "mlp: tile is 0; expected at least 1 token, or None"),
    (lambda: rotated(unsqueeze_dim=3), "unsqueeze_dim is 3; expected that of the heads, 1 or 2"),
    (lambda: rotated(k=ones(2, 2, 5, 16).bfloat16()), "q is torch.float32 and k torch.bfloat16"),
    (lambda: rotated(q=ones(2, 4, 5, 16).int()), "q is torch.int32"),
    (lambda: rotated(q=ones(2, 4, 5, 16, device="meta")), "q is on meta and k on cpu"),
    (lambda: rotated(q=ones(4, 5, 16)), "expected q and k of shape (B, heads, S, D)"),
    (lambda: rotated(k=ones(2, 5, 16)), "k (2, 5, 16)"),
    (lambda: rotated(k=ones(2, 2, 4, 16)), "k (2, 2, 4, 16)"),
    (lambda: rotated(k=ones(2, 2, 5, 8)), "k (2, 2, 5, 8)"),
    (lambda: rotated(k=ones(1, 2, 5, 16)), "k (1, 2, 5, 16)"),
    (lambda: rotated(sin=ones(1, 5, 8)), "sin (1, 5, 8)"),
    (lambda: rotated(cos=ones(3, 5, 16), sin=ones(3, 5, 16)), "cos (3, 5, 16)"),
    (lambda: rotated(cos=ones(1, 1, 16), sin=ones(1, 1, 16)), "cos (1, 1, 16)"),
    *(
        (lambda width=width: rotated(cos=ones(1, 5, width), sin=ones(1, 5, width)), "even R of at most D")
        for width in (18, 15, 0)
    ),
    (lambda: rotated(cos=ones(5, 16), sin=ones(5, 16)), "cos (5, 16)"),
    (lambda: loss(ROWS, ones(3, 5), CLASSES), "linear_cross_entropy: expected hidden (..., H), weight (V, H) with"),
    (lambda: loss(ROWS, ones(3, 5), CLASSES), "found hidden (2, 4), weight (3, 5)"),
    (lambda: loss(ROWS, ones(4), CLASSES), "weight (4,)"),
    (lambda: loss(ROWS, ones(0, 4), CLASSES), "V > 0"),
    (lambda: loss(*HEAD, ones(4)), "bias (4,)"),
    (lambda: loss(torch.tensor(1.0), ones(3, 4), CLASSES), "found hidden ()"),
    (lambda: loss(ROWS.half(), ones(3, 4), CLASSES), "found hidden torch.float16, weight torch.float32"),
    (lambda: loss(ROWS.long(), ones(3, 4), CLASSES), "hidden is torch.int64"),
    (lambda: loss(ROWS, ones(3, 4), CLASSES.int()), "target is torch.int32 of shape (2,) on cpu"),
    (lambda: loss(ROWS, ones(3, 4), CLASSES[:1]), "expected torch.int64 of shape (2,)"),
    (lambda: loss(ROWS, ones(3, 4), CLASSES.to("meta")), "on meta"),
    (lambda: loss(ROWS, ones(3, 4, device="meta"), CLASSES), "weight on meta"),
    (lambda: loss(class_weights=ones(2)), "class_weights has shape (2,); expected (3,)"),
    (lambda: loss(class_weights=ones(3, requires_grad=True)), "class_weights requires a gradient"),
    (lambda: loss(label_smoothing=1.5), "label_smoothing is 1.5; expected a number from 0 to 1"),
    (lambda: loss(z_loss=-1.0), "z_loss is -1.0; expected a number of at least 0"),
    (lambda: loss(softcap=0.0), "softcap is 0.0; expected None or a number above 0"),
    (lambda: loss(reduction="max"), "unknown reduction 'max'; expected one of mean, sum, none"),
    (lambda: loss(logits_bytes=-1), "logits_bytes is -1; expected at least 0 bytes"),
    (lambda: loss(logits_bytes=-1, return_logits=True), "logits_bytes is -1; expected at least 0 bytes"),
    (lambda: log_probs(ROWS, ones(3, 5), CLASSES), "linear_log_probs: expected hidden (..., H), weight (V, H) with"),
    (lambda: log_probs(ROWS, ones(3, 4), [0, 1]), "linear_log_probs: target is list; expected a Tensor"),
    (lambda: log_probs(ROWS, ones(3, 4), CLASSES[:1, None]), "expected torch.int64 of shape (2, 1)"),
    (lambda: log_probs(ROWS, ones(3, 4), CLASSES[:, None][:, :0]), "(2, 0); expected at least one word a token"),
    (lambda: log_probs(temperature=0.0), "linear_log_probs: temperature is 0.0; expected a number above 0"),
    (lambda: log_probs(scale=-1.0), "scale is -1.0; expected a number above 0"),
    (lambda: log_probs(softcap=float("inf")), "softcap is inf; expected None or a number above 0"),
    (lambda: log_probs(logits_bytes=-1), "linear_log_probs: logits_bytes is -1; expected at least 0 bytes"),
    (lambda: divergence(ones(2, 5), ones(3, 6)), "linear_divergence: expected teacher (..., H), teacher_weight (V, H)"),
    (lambda: divergence(ones(3, 5), ones(3, 5)), "student (2, 4) has 3 words, and teacher (3, 5) has 3"),
    (lambda: divergence(ones(2, 5), ones(4, 5)), "expected the same tokens and words for both"),
    (lambda: divergence(ones(2, 5)), "expected teacher_weight or teacher_indices; found neither"),
    (lambda: divergence(*TEACHER, **WORDS), "expected teacher_weight or teacher_indices; found both"),
    (lambda: divergence(INTS), "teacher is torch.int32"),
    (lambda: divergence(META, ones(3, 4)), "student is on cpu and teacher on meta"),
    (lambda: divergence(student_bias=ones(4)), "student_bias (4,)"),
    (lambda: divergence(teacher_bias=ones(4)), "teacher_bias (4,)"),
    (lambda: divergence(kind="kl"), "unknown kind 'kl'; expected one of forward_kl, reverse_kl, jsd, total_variation"),
    (lambda: divergence(kind="jsd", beta=1.5), "beta is 1.5; expected a number from 0 to 1"),
    (lambda: divergence(temperature=0.0), "linear_divergence: temperature is 0.0"),
    (lambda: divergence(teacher_softcap=-1.0), "teacher_softcap is -1.0"),
    (lambda: divergence(logits_bytes=-1), "linear_divergence: logits_bytes is -1"),
    (lambda: divergence(ones(3, 5), **WORDS), "teacher (..., K) with K > 0 for student (..., H); found teacher (3, 5)"),
    (lambda: divergence(ROWS, **WORDS), "teacher_indices is torch.int64 (2, 5) on cpu; expected torch.int64 (2, 4)"),
    (lambda: divergence(ones(2, 5), **WORDS, teacher_logsumexp=ones(5)), "teacher_logsumexp is (5,); expected (2,)"),
    (
        lambda: divergence(ones(2, 5), **WORDS, kind="reverse_kl"),
        "reverse_kl is infinite where the teacher's list leaves",
    ),
    (lambda: cross_entropy(torch.tensor(1.0), CLASSES), "logits has shape (); expected (..., V) with V > 0"),
    (lambda: cross_entropy(ones(3, 0), CLASSES), "logits has shape (3, 0); expected (..., V) with V > 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(KernelError, match=re.escape(message)):
        call()


MIXED = {
    "gated_mlp": lambda: gated_mlp(SQUARE, SQUARE, NARROW, SQUARE),
    "mlp": lambda: mlp(SQUARE, SQUARE, NARROW),
    "linear_cross_entropy": lambda: loss(ROWS, ones(3, 4, dtype=torch.bfloat16), CLASSES),
    "linear_log_probs": lambda: log_probs(ROWS, ones(3, 4, dtype=torch.bfloat16), CLASSES),
    "linear_divergence": lambda: divergence(ones(2, 5), ones(3, 5, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("op", MIXED)
def test_what_autocast_allows_is_refused_without_it(op):
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            MIXED[op]()
        with pytest.raises(KernelError, match=f"^{op}: expected one dtype, found .*bfloat16"):
            MIXED[op]()
