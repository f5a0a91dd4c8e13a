"""The norms there are, and what each is found to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import TinyRMSNorm
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.idefics.modeling_idefics import IdeficsRMSNorm
from transformers.models.kosmos2_5.modeling_kosmos2_5 import Kosmos2_5LayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.longt5.modeling_longt5 import LongT5LayerNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructLayerNorm
from transformers.models.pop2piano.modeling_pop2piano import Pop2PianoLayerNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersLayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.udop.modeling_udop import UdopLayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

from recompute.substitution.norm import KernelLayerNorm, KernelRMSNorm

HIDDEN = 32
Norm = tuple[nn.Module, KernelRMSNorm | KernelLayerNorm]
RMS_NORMS: list[tuple[type[nn.Module], str]] = [
    *((cls, "llama") for cls in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Phi3RMSNorm)),
    *((cls, "gemma") for cls in (GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm)),
    *((cls, "none") for cls in (nn.RMSNorm, Olmo2RMSNorm, HeliumRMSNorm, Gemma3nRMSNorm, Gemma4RMSNorm)),
]
ASKING = [
    T5LayerNorm,
    *(IdeficsRMSNorm, Kosmos2_5LayerNorm, LongT5LayerNorm, MT5LayerNorm, Pix2StructLayerNorm),
    *(Pop2PianoLayerNorm, SwitchTransformersLayerNorm, UdopLayerNorm, UMT5LayerNorm),
]
"""They ask for the dtype of their weight, and have kernels where input and weight have one dtype."""
ASKING_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def made(cls: type[nn.Module], eps: float = 1e-5) -> nn.Module:
    torch.manual_seed(0)
    return varied(cls(HIDDEN, eps=eps))


def varied(module: nn.Module) -> nn.Module:
    """With parameters of which none is neutral."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return module


def norm_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """An RMSNorm of somebody's own."""
    module = type("SomeNorm", (TinyRMSNorm,), {"forward": forward})(HIDDEN)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class WithForward(nn.LayerNorm):
    """A LayerNorm whose forward is given."""

    def __init__(self, forward: Callable[..., Tensor], **options: Any):
        super().__init__(HIDDEN, **options)
        self.run = forward
        self.other = nn.Parameter(torch.ones(HIDDEN + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_float32(self: Any, x: Tensor) -> Tensor:
    weight = None if self.weight is None else self.weight.float()
    bias = None if self.bias is None else self.bias.float()
    return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


def written_out(self: Any, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    mean = torch.mean(wide, -1, keepdim=True)
    scale = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + self.eps)
    return torch.add(torch.mul(scale * torch.sub(wide, mean), self.weight.float()), self.bias.float()).to(x.dtype)


def in_other_words(self: Any, hidden: Tensor) -> Tensor:
    wide = hidden.float()
    scale = torch.rsqrt(torch.mean(wide.pow(2), dim=-1, keepdim=True) + self.eps)
    return torch.mul((scale * wide).type_as(hidden), self.weight)


def weight_before_rounding(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return (self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


LLAMA_LIKE = KernelRMSNorm("weight", 1e-6, "llama")
OF_ONES_OWN: dict[str, Norm] = {
    "Llama's": (norm_of(lambda self, x: TinyRMSNorm.forward(self, x)), LLAMA_LIKE),
    "Llama's in other words": (norm_of(in_other_words), LLAMA_LIKE),
    "weight before rounding": (norm_of(weight_before_rounding), KernelRMSNorm("weight", 1e-6, "none")),
    "Gemma 4 without a weight": (Gemma4RMSNorm(HIDDEN, eps=1e-3, with_scale=False), KernelRMSNorm(None, 1e-3, "none")),
    "torch's without a weight": (nn.RMSNorm(HIDDEN, 1e-3, False), KernelRMSNorm(None, 1e-3, "none")),
    "x.size(-1)": (norm_of(lambda self, x: F.rms_norm(x, (x.size(-1),))), KernelRMSNorm(None, None, "none")),
    "x.shape[-1]": (
        norm_of(lambda self, x: F.rms_norm(x, (x.shape[-1],), eps=self.eps)),
        KernelRMSNorm(None, 1e-6, "none"),
    ),
    "x.shape[-1:]": (
        norm_of(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight)),
        KernelRMSNorm("weight", None, "none"),
    ),
    "its width": (
        norm_of(lambda self, x: F.rms_norm(x, (HIDDEN,), self.weight, 1e-5)),
        KernelRMSNorm("weight", 1e-5, "none"),
    ),
    "the weight's": (
        norm_of(lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, eps=self.eps)),
        KernelRMSNorm("weight", 1e-6, "none"),
    ),
}
LAYER_NORMS: dict[str, Norm] = {
    "torch": (nn.LayerNorm(HIDDEN, 1e-3), KernelLayerNorm("weight", "bias", 1e-3, HIDDEN, True)),
    "torch, no bias": (nn.LayerNorm(HIDDEN, bias=False), KernelLayerNorm("weight", None, 1e-5, HIDDEN, True)),
    "torch, no affine": (nn.LayerNorm(HIDDEN, 1e-5, False), KernelLayerNorm(None, None, 1e-5, HIDDEN, True)),
    "of its weight's shape": (
        WithForward(lambda self, x: F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)),
        KernelLayerNorm("weight", "bias", 1e-5, HIDDEN, True),
    ),
    "in float32": (WithForward(in_float32, eps=0.5), KernelLayerNorm("weight", "bias", 0.5, HIDDEN, False)),
    "in float32, no bias": (
        WithForward(in_float32, bias=False),
        KernelLayerNorm("weight", None, 1e-5, HIDDEN, False),
    ),
    "written out": (WithForward(written_out), KernelLayerNorm("weight", "bias", 1e-5, None, False)),
    "Cohere": (CohereLayerNorm(HIDDEN, 1e-3), KernelLayerNorm("weight", None, 1e-3, None, False)),
    "Cohere 2": (Cohere2LayerNorm(HIDDEN), KernelLayerNorm("weight", None, 1e-5, None, False)),
    "OLMo": (OlmoLayerNorm(HIDDEN), KernelLayerNorm(None, None, 1e-5, HIDDEN, False)),
}
for each in (*OF_ONES_OWN.values(), *LAYER_NORMS.values()):
    varied(each[0])
NORMS: dict[str, Norm] = {
    **{
        f"{cls.__name__}, {eps}": (made(cls, eps), KernelRMSNorm("weight", eps, casting))
        for cls, casting in RMS_NORMS
        for eps in (1e-6, 1.0)
    },
    **{cls.__name__: (made(cls, 1e-3), KernelRMSNorm("weight", 1e-3, "llama", ASKING_DTYPES)) for cls in ASKING},
    **OF_ONES_OWN,
    **LAYER_NORMS,
}
