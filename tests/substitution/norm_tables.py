"""The norms there are, and what each is found to be; and what is nearly a norm."""

import torch
from layer_testing import theirs
from tiny import TinyRMSNorm
from torch import Tensor, nn
from torch.nn import functional as F

from recompute.kernels.norm_ops import LAYER_NORM
from recompute.substitution.norm import KernelNorm

HIDDEN = 32
CohereLayerNorm, Cohere2LayerNorm, OlmoLayerNorm, NemotronLayerNorm1P, Gemma4RMSNorm = theirs(
    *("cohere.CohereLayerNorm", "cohere2.Cohere2LayerNorm", "olmo.OlmoLayerNorm", "nemotron.NemotronLayerNorm1P"),
    "gemma4.Gemma4RMSNorm",
)
CASTINGS = {
    "llama": ("llama.LlamaRMSNorm", "mistral.MistralRMSNorm", "qwen2.Qwen2RMSNorm", "qwen3.Qwen3RMSNorm"),
    "gemma": ("gemma.GemmaRMSNorm", "gemma2.Gemma2RMSNorm", "gemma3.Gemma3RMSNorm"),
    "none": ("olmo2.Olmo2RMSNorm", "helium.HeliumRMSNorm", "gemma3n.Gemma3nRMSNorm", "gemma4.Gemma4RMSNorm"),
}
RMS_NORMS = [
    *((cls, casting) for casting, paths in CASTINGS.items() for cls in theirs(*paths)),
    *((theirs("phi3.Phi3RMSNorm")[0], "llama"), (nn.RMSNorm, "none")),
]
ASKING = theirs(
    *("t5.T5LayerNorm", "idefics.IdeficsRMSNorm", "kosmos2_5.Kosmos2_5LayerNorm", "longt5.LongT5LayerNorm"),
    *("mt5.MT5LayerNorm", "pix2struct.Pix2StructLayerNorm", "pop2piano.Pop2PianoLayerNorm", "udop.UdopLayerNorm"),
    *("switch_transformers.SwitchTransformersLayerNorm", "umt5.UMT5LayerNorm"),
)
"""They ask for the dtype of their weight, and have kernels where input and weight have one dtype."""
ASKING_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def made(cls, eps=1e-5):
    torch.manual_seed(0)
    return varied(cls(HIDDEN, eps=eps))


def varied(module):
    """With parameters of which none is neutral."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return module


def norm_of(forward, **attributes):
    """An RMSNorm of somebody's own."""
    module = type("SomeNorm", (TinyRMSNorm,), {"forward": forward})(HIDDEN)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class WithForward(nn.LayerNorm):
    """A LayerNorm whose forward is given."""

    def __init__(self, forward, **options):
        super().__init__(HIDDEN, **options)
        self.run = forward
        self.other = nn.Parameter(torch.ones(HIDDEN + 1))

    def forward(self, x):
        return self.run(self, x)


def in_float32(self, x):
    weight = None if self.weight is None else self.weight.float()
    bias = None if self.bias is None else self.bias.float()
    return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


def written_out(self, x):
    wide = x.to(torch.float32)
    mean = torch.mean(wide, -1, keepdim=True)
    scale = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + self.eps)
    return torch.add(torch.mul(scale * torch.sub(wide, mean), self.weight.float()), self.bias.float()).to(x.dtype)


def in_other_words(self, hidden):
    wide = hidden.float()
    scale = torch.rsqrt(torch.mean(wide.pow(2), dim=-1, keepdim=True) + self.eps)
    return torch.mul((scale * wide).type_as(hidden), self.weight)


def weight_before_rounding(self, x):
    h = x.to(torch.float32)
    return (self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


LLAMA_LIKE = KernelNorm("weight", None, 1e-6, "llama")


def torchs(weight, eps):
    return KernelNorm(weight, None, eps, "none")


def centered(weight, bias, eps, width, is_functional):
    return KernelNorm(weight, bias, eps, LAYER_NORM, width, is_functional)


def asking(*dtypes, eps=1e-6):
    return KernelNorm("weight", None, eps, "llama", dtypes=frozenset(dtypes) if dtypes else None)


OF_ONES_OWN = {
    "Llama's": (norm_of(lambda self, x: TinyRMSNorm.forward(self, x)), LLAMA_LIKE),
    "Llama's in other words": (norm_of(in_other_words), LLAMA_LIKE),
    "weight before rounding": (norm_of(weight_before_rounding), torchs("weight", 1e-6)),
    "Gemma 4 without a weight": (Gemma4RMSNorm(HIDDEN, eps=1e-3, with_scale=False), torchs(None, 1e-3)),
    "torch's without a weight": (nn.RMSNorm(HIDDEN, 1e-3, False), torchs(None, 1e-3)),
    "x.size(-1)": (norm_of(lambda self, x: F.rms_norm(x, (x.size(-1),))), torchs(None, None)),
    "x.shape[-1]": (norm_of(lambda self, x: F.rms_norm(x, (x.shape[-1],), eps=self.eps)), torchs(None, 1e-6)),
    "x.shape[-1:]": (norm_of(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight)), torchs("weight", None)),
    "its width": (norm_of(lambda self, x: F.rms_norm(x, (HIDDEN,), self.weight, 1e-5)), torchs("weight", 1e-5)),
    "the weight's": (
        norm_of(lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, eps=self.eps)),
        torchs("weight", 1e-6),
    ),
}
LAYER_NORMS = {
    "torch": (nn.LayerNorm(HIDDEN, 1e-3), centered("weight", "bias", 1e-3, HIDDEN, True)),
    "torch, no bias": (nn.LayerNorm(HIDDEN, bias=False), centered("weight", None, 1e-5, HIDDEN, True)),
    "torch, no affine": (nn.LayerNorm(HIDDEN, 1e-5, False), centered(None, None, 1e-5, HIDDEN, True)),
    "of its weight's shape": (
        WithForward(lambda self, x: F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)),
        centered("weight", "bias", 1e-5, HIDDEN, True),
    ),
    "in float32": (WithForward(in_float32, eps=0.5), centered("weight", "bias", 0.5, HIDDEN, False)),
    "in float32, no bias": (WithForward(in_float32, bias=False), centered("weight", None, 1e-5, HIDDEN, False)),
    "written out": (WithForward(written_out), centered("weight", "bias", 1e-5, None, False)),
    "Cohere": (CohereLayerNorm(HIDDEN, 1e-3), centered("weight", None, 1e-3, None, False)),
    "Cohere 2": (Cohere2LayerNorm(HIDDEN), centered("weight", None, 1e-5, None, False)),
    "OLMo": (OlmoLayerNorm(HIDDEN), centered(None, None, 1e-5, HIDDEN, False)),
}
for each in (*OF_ONES_OWN.values(), *LAYER_NORMS.values()):
    varied(each[0])
NORMS = {
    **{
        f"{cls.__name__}, {eps}": (made(cls, eps), KernelNorm("weight", None, eps, casting))
        for eps in (1e-6, 1.0)
        for cls, casting in RMS_NORMS
    },
    **{cls.__name__: (made(cls, 1e-3), asking(*ASKING_DTYPES, eps=1e-3)) for cls in ASKING},
    **OF_ONES_OWN,
    **LAYER_NORMS,
}


def root(self, h):
    return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)


def llama(self, x, by=root):
    """What the near misses below nearly are, where ``by`` is ``root``."""
    h = x.to(torch.float32)
    return self.weight * (h * by(self, h)).to(x.dtype)


def in_place(self, x):
    h = x.to(torch.float32)
    h *= root(self, h)  # writes into x, where that is float32
    return self.weight * h.to(x.dtype)


def noting_its_variance(self, x):
    self.variance = x.pow(2).mean(-1, keepdim=True)  # which a stand-in would not note
    return llama(self, x)


def without_gradient_of_the_root(self, x):
    h = x.to(torch.float32)
    with torch.no_grad():
        by = root(self, h)
    return self.weight * (h * by).to(x.dtype)


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
        return llama(self, x)


@torch.fx.wrap
def rsqrt(x):
    """Bears an op's name, and is another function."""
    return 2 * torch.rsqrt(x)


NOTED = []
NO_RMS_NORMS = {
    "over two dimensions": lambda self, x: F.rms_norm(x, x.shape[-2:], None, self.eps),
    "over all but the first": lambda self, x: F.rms_norm(x, x.shape[1:], None, self.eps),
    "with the width of another dimension": lambda self, x: F.rms_norm(x, (x.shape[0],), None, self.eps),
    "with one plus the weight": lambda self, x: F.rms_norm(x, (HIDDEN,), 1 + self.weight, self.eps),
    "mean subtracted": lambda self, x: llama(self, x - x.mean(-1, keepdim=True)),
    "with a bias": lambda self, x: llama(self, x) + self.bias,
    "with sqrt": lambda self, x: (
        self.weight * ((h := x.float()) / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
    ),
    "epsilon outside": lambda self, x: llama(
        self, x, lambda self, h: torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) + self.eps
    ),
    "no epsilon": lambda self, x: llama(self, x, lambda _, h: torch.rsqrt(h.pow(2).mean(-1, keepdim=True))),
    "another dimension": lambda self, x: llama(
        self, x, lambda self, h: torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + self.eps)
    ),
    "summed": lambda self, x: llama(self, x, lambda self, h: torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)),
    "cubed": lambda self, x: llama(self, x, lambda self, h: torch.rsqrt(h.pow(3).mean(-1, keepdim=True) + self.eps)),
    "with another power": lambda self, x: (
        (h := x.float()) * torch.pow(h.pow(2).mean(-1, keepdim=True) + self.eps, -0.25) * self.weight.float()
    ).type_as(x),
    "weight and no rounding": lambda self, x: self.weight * ((h := x.to(torch.float32)) * root(self, h)),
    "weight before the root": lambda self, x: ((self.weight * (h := x.float())) * root(self, h)).to(x.dtype),
    "in low precision": lambda self, x: self.weight * (x * root(self, x)),
    "in double precision": lambda self, x: self.weight * ((h := x.to(torch.float64)) * root(self, h)).to(x.dtype),
    "rounded to bfloat16": lambda self, x: self.weight * ((h := x.float()) * root(self, h)).to(torch.bfloat16),
    "gain from two": lambda self, x: ((h := x.float()) * root(self, h) * (2.0 + self.weight.float())).type_as(x),
    "numbers in each other's place": lambda self, x: (
        ((h := x.float()) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1.0)) * (1e-6 + self.weight.float())
    ).type_as(x),
    "squared weight": lambda self, x: self.weight * llama(self, x),
    "with dropout": lambda self, x: F.dropout(llama(self, x), 0.1, self.training),
    "dropping when it trains": lambda self, x: F.dropout(llama(self, x), 0.1) if self.training else llama(self, x),
    "branching on values": lambda self, x: llama(self, x) if x.abs().max() > 0 else x,
    "branching on shape": lambda self, x: llama(self, x) if x.shape[0] > 1 else x,
    "with a residual": lambda self, x, residual: llama(self, x + residual),
    "two outputs": lambda self, x: (llama(self, x), x),
    "noting its output elsewhere": lambda self, x: (y := llama(self, x), NOTED.append(y))[0],
    "clamped in place": lambda self, x: (y := llama(self, x), y.clamp_(-0.5, 0.5))[0],  # what this returns nobody reads
    "asking for gradients": lambda self, x: llama(self, x) if torch.is_grad_enabled() else x,
    "asking for autocast": lambda self, x: x if torch.is_autocast_enabled("cpu") else llama(self, x),
    "doubling tensors": lambda self, x: llama(self, x * 2 if isinstance(x, Tensor) else x),
    "doubling long tensors": lambda self, x: llama(self, x * 2 if isinstance(x, Tensor) and len(x) == 12345 else x),
    "doubling what is a tensor": lambda self, x: llama(self, x * 2 if torch.is_tensor(x) else x),
    "shifting what has one type": lambda self, x: llama(self, x + 1 if type(x) is Tensor else x),
    "a LayerNorm with other signs": lambda self, x: (
        self.weight.float()
        * (torch.sub(other=(h := x.float()), input=(m := h.mean(-1, keepdim=True))))
        * torch.rsqrt((h - m).pow(2).mean(-1, keepdim=True) + self.eps)
    ).type_as(x),
    "with a function of an op's name": lambda self, x: llama(
        self, x, lambda self, h: rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    ),
    **{each.__name__: each for each in (in_place, noting_its_variance, without_gradient_of_the_root, without_autocast)},
}


def layer(x, *parameters, eps=1e-5):
    return F.layer_norm(x, (HIDDEN,), *parameters, eps=eps)


def scaled(h, centered, of):
    return centered * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + 1e-5)


NO_LAYER_NORMS = {
    "mean in low precision": lambda self, x: written_out(self, x - x.mean(-1, keepdim=True)),
    "by deviation": lambda self, x: (
        self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias
    ),
    "bias after rounding": lambda self, x: in_float32(self, x) + self.bias,
    "weight from zero": lambda self, x: layer(x, self.weight + 1, self.bias),
    "of another shape": lambda self, x: F.layer_norm(x, self.other.shape, self.weight, self.bias, self.eps),
    "over two dimensions of its own": lambda self, x: F.layer_norm(x, (2, HIDDEN), None, None, self.eps),
    "of something else": lambda self, x: layer(x * 2, self.weight, self.bias),
    "in double": lambda self, x: layer(x.double()).type_as(x),
    "cast and not back": lambda self, x: layer(x.float()),
    "parameters as they are": lambda self, x: layer(x.float(), self.weight, self.bias).type_as(x),
    "difference the other way": lambda self, x: (
        scaled(h := x.float(), (m := h.mean(-1, keepdim=True)) - h, h - m) * self.weight.float()
    ).to(x.dtype),
    "uncentered variance": lambda self, x: (
        scaled(h := x.float(), h - h.mean(-1, keepdim=True), h) * self.weight.float()
    ).to(x.dtype),
}
MISSES = {
    **{name: norm_of(forward, bias=nn.Parameter(torch.ones(HIDDEN))) for name, forward in NO_RMS_NORMS.items()},
    **{name: WithForward(forward) for name, forward in NO_LAYER_NORMS.items()},
    "Nemotron's": NemotronLayerNorm1P(HIDDEN),
    "a LayerNorm of two dimensions": nn.LayerNorm((2, HIDDEN)),
    "an RMSNorm of two dimensions": nn.RMSNorm((2, HIDDEN), eps=1e-6),
    **{repr(each): each for each in (nn.GroupNorm(1, HIDDEN), nn.Identity(), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))},
}


def normalized(self, x):
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)


def of_its_input(self, x):
    """As T5's."""
    h = normalized(self, x)
    return self.weight * (h if x.dtype == self.weight.dtype == torch.float32 else h.to(self.weight.dtype))


def of_what_it_computes(self, x):
    h = normalized(self, x)
    return self.weight * (h if h.dtype == self.weight.dtype else h.to(self.weight.dtype))


def in_bfloat16_alone(self, x):
    return self.weight * (normalized(self, x).to(x.dtype) if self.weight.dtype == torch.bfloat16 else x)


def where_no_other_norm_is_in_half(self, x):
    h = normalized(self, x)
    return self.weight * (h.to(x.dtype) if self.weight.dtype == torch.float16 else 2 * h)


def rounded_to_another(self, x):
    return self.weight * (normalized(self, x).to(torch.float16) if self.weight.dtype == torch.bfloat16 else x)


def of_a_buffer(self, x):
    h = normalized(self, x)
    return self.weight * (h if self.table.dtype == torch.int8 else h.to(x.dtype))


def with_table(forward):
    module = norm_of(forward)
    module.register_buffer("table", torch.ones(2))
    return module


ASKED = {
    "of its input": (norm_of(of_its_input), asking(*ASKING_DTYPES)),
    "of what it computes": (norm_of(of_what_it_computes), asking(*ASKING_DTYPES)),
    "no question, and nothing rounded": (
        norm_of(lambda self, x: self.weight * normalized(self, x)),
        asking(torch.float32, torch.float64),
    ),
    "in bfloat16 alone": (norm_of(in_bfloat16_alone).to(torch.bfloat16), asking(torch.bfloat16)),
    "a weight of any dtype": (norm_of(lambda self, x: normalized(self, x).to(x.dtype) * self.weight), asking()),
}
"""A question of dtypes counts by what it decides, and not by how it is asked."""
MISSES |= {
    "asking, a norm in bfloat16 alone": norm_of(in_bfloat16_alone),
    **{
        f"asking, {forward.__name__}, {dtype}": norm_of(forward).to(dtype)
        for forward in (where_no_other_norm_is_in_half, rounded_to_another)
        for dtype in (torch.float32, torch.bfloat16)
    },
    "asking for a device": norm_of(
        lambda self, x: self.weight * (x if x.device.type == "meta" else normalized(self, x).to(x.dtype))
    ),
    "asking for a buffer": with_table(of_a_buffer),
    "asking beside other parameters": norm_of(of_its_input, other=nn.Parameter(torch.ones(2))),
}
