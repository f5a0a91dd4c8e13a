"""diffusers' denoisers and autoencoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workload import Run, workload

HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
TWO_STAGES = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
CROSS = {
    **TWO_STAGES,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
ENCODER = {**TWO_STAGES, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


@dataclass(frozen=True)
class Denoiser:
    """A class of diffusers, and how a small one is made and called.

    given: what forward gets, by name: normal numbers of a shape, or a tensor that is always the same.
    """

    kind: str
    options: dict[str, Any]
    given: dict[str, Any]
    checkpoints: bool = False


TIME = torch.tensor([3, 500])
MASK = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
NOISED = {"sample": (2, 4, 16, 16), "timestep": TIME}

DENOISERS: dict[str, Denoiser] = {
    "UNet": Denoiser(
        "UNet2DModel",
        {**TWO_STAGES, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "dropout": 0.1}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 3, 16, 16), "timestep": TIME},
    ),
    "UNet with text (Stable Diffusion)": Denoiser(
        "UNet2DConditionModel",
        {**CROSS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "dropout": 0.1},
        {**NOISED, "encoder_hidden_states": (2, 8, 32)},
    ),
    "UNet with text, its own checkpoints": Denoiser(
        "UNet2DConditionModel",
        {**CROSS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {**NOISED, "encoder_hidden_states": (2, 8, 32)},
        checkpoints=True,
    ),
    "ControlNet": Denoiser(
        "ControlNetModel",
        {**CROSS, "conditioning_embedding_out_channels": (8, 16)},
        {**NOISED, "encoder_hidden_states": (2, 8, 32), "controlnet_cond": (2, 3, 32, 32)},
    ),
    "Flux": Denoiser(
        "FluxTransformer2DModel",
        {**HEADS, "in_channels": 16, "num_single_layers": 2, "joint_attention_dim": 32}
        | {"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": (1, 64, 16),
            "encoder_hidden_states": (1, 8, 32),
            "pooled_projections": (1, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
            "txt_ids": torch.zeros(8, 3),
        },
    ),
    "Stable Diffusion 3": Denoiser(
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32}
        | {"caption_projection_dim": 64, "pooled_projection_dim": 32, "pos_embed_max_size": 16}
        | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        {
            "hidden_states": (2, 4, 16, 16),
            "encoder_hidden_states": (2, 8, 32),
            "pooled_projections": (2, 32),
            "timestep": TIME,
        },
    ),
    "PixArt": Denoiser(
        "PixArtTransformer2DModel",
        {**HEADS, "in_channels": 4, "cross_attention_dim": 64, "caption_channels": 32, "sample_size": 16}
        | {"use_additional_conditions": False, "dropout": 0.1},
        {
            "hidden_states": (2, 4, 16, 16),
            "encoder_hidden_states": (2, 8, 32),
            "encoder_attention_mask": MASK,
            "timestep": TIME,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "DiT": Denoiser(
        "DiTTransformer2DModel",
        {**HEADS, "in_channels": 4, "sample_size": 16, "num_embeds_ada_norm": 1000, "dropout": 0.1},
        {"hidden_states": (2, 4, 16, 16), "timestep": TIME, "class_labels": torch.tensor([1, 2])},
    ),
    "HunyuanDiT": Denoiser(
        "HunyuanDiT2DModel",
        {**HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 16, "hidden_size": 64, "cross_attention_dim": 32}
        | {"cross_attention_dim_t5": 32, "pooled_projection_dim": 16, "text_len": 8, "text_len_t5": 8}
        | {"use_style_cond_and_image_meta_size": False},
        {
            "hidden_states": (2, 4, 16, 16),
            "timestep": TIME.float(),
            "encoder_hidden_states": (2, 8, 32),
            "text_embedding_mask": MASK,
            "encoder_hidden_states_t5": (2, 8, 32),
            "text_embedding_mask_t5": MASK,
            "image_rotary_emb": (torch.linspace(-1, 1, 64 * 16).view(64, 16), torch.ones(64, 16)),
        },
    ),
    "CogVideoX": Denoiser(
        "CogVideoXTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8, "dropout": 0.1},
        {"hidden_states": (2, 3, 4, 8, 8), "encoder_hidden_states": (2, 8, 32), "timestep": TIME},
    ),
    "LTX": Denoiser(
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "caption_channels": 32},
        {
            "hidden_states": (2, 32, 8),
            "encoder_hidden_states": (2, 8, 32),
            "timestep": TIME,
            "encoder_attention_mask": MASK,
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    "Wan": Denoiser(
        "WanTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 128}
        | {"rope_max_seq_len": 32},
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 8, 32), "timestep": TIME},
    ),
    "Sana": Denoiser(
        "SanaTransformer2DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 16}
        | {"cross_attention_dim": 64, "caption_channels": 32, "sample_size": 16},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 8, 32), "timestep": TIME}
        | {"encoder_attention_mask": MASK},
    ),
    "Qwen-Image": Denoiser(
        "QwenImageTransformer2DModel",
        {**HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": (1, 16, 16),
            "encoder_hidden_states": (1, 8, 32),
            "encoder_hidden_states_mask": MASK[1:],
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 4, 4)]],
        },
    ),
    "AuraFlow": Denoiser(
        "AuraFlowTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 16, "num_mmdit_layers": 2, "num_single_dit_layers": 2}
        | {"sample_size": 16, "joint_attention_dim": 32, "caption_projection_dim": 64, "pos_embed_max_size": 64},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 8, 32), "timestep": torch.tensor([0.1, 0.9])},
    ),
    "Kandinsky's prior": Denoiser(
        "PriorTransformer",
        {**HEADS, "embedding_dim": 32, "num_embeddings": 8, "dropout": 0.1},
        {"hidden_states": (2, 32), "timestep": TIME, "proj_embedding": (2, 32), "encoder_hidden_states": (2, 8, 32)},
    ),
    "AutoencoderKL": Denoiser("AutoencoderKL", ENCODER, {"sample": (2, 3, 32, 32), "sample_posterior": True}),
    "VQModel": Denoiser("VQModel", {**ENCODER, "num_vq_embeddings": 16}, {"sample": (2, 3, 32, 32)}),
    "AutoencoderTiny": Denoiser(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (16,) * 4, "decoder_block_out_channels": (16,) * 4}
        | {"num_encoder_blocks": (1, 1, 1, 1), "num_decoder_blocks": (1, 1, 1, 1)},
        {"sample": (2, 3, 32, 32)},
    ),
}


def drawn(value: Any) -> Any:
    is_shape = isinstance(value, tuple) and all(isinstance(each, int) for each in value)
    return torch.randn(value) if is_shape else value


def define(name: str, denoiser: Denoiser) -> None:
    @workload("diffusers", name)
    def train(run: Run) -> None:
        import diffusers

        model = getattr(diffusers, denoiser.kind)(**denoiser.options)
        if denoiser.checkpoints:
            model.enable_gradient_checkpointing()
        run.govern(model)

        def loss() -> Tensor:
            outputs = list(model(**{name: drawn(value) for name, value in denoiser.given.items()}).values())
            tensors = [
                each for output in outputs for each in (output if isinstance(output, (list, tuple)) else [output])
            ]
            return torch.stack([(each - torch.randn_like(each)).pow(2).mean() for each in tensors]).sum()

        run.train(model, loss)


for name, denoiser in DENOISERS.items():
    define(name, denoiser)


@workload("diffusers", "Stable Diffusion with LoRA and a frozen autoencoder", "peft")
def stable_diffusion_lora(run: Run) -> None:
    import diffusers
    import peft

    unet = diffusers.UNet2DConditionModel(**DENOISERS["UNet with text (Stable Diffusion)"].options).requires_grad_(
        False
    )
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    encoder = diffusers.AutoencoderKL(**ENCODER).requires_grad_(False)
    scheduler = diffusers.DDPMScheduler()
    run.govern(unet)

    def loss() -> Tensor:
        with torch.no_grad():
            latents = encoder.encode(torch.randn(2, 3, 32, 32)).latent_dist.sample()
        noise, times = torch.randn_like(latents), torch.randint(0, 1000, (2,))
        predicted = unet(scheduler.add_noise(latents, noise, times), times, torch.randn(2, 8, 32)).sample
        return (predicted - noise).pow(2).mean()

    run.train(unet, loss)


@workload("diffusers", "UNet with an average of the weights under bfloat16")
def unet_ema(run: Run) -> None:
    import diffusers
    from diffusers.training_utils import EMAModel

    model = run.govern(diffusers.UNet2DModel(**DENOISERS["UNet"].options))
    average = EMAModel(model.parameters(), decay=0.9)

    def loss() -> Tensor:
        average.step(model.parameters())
        noise = torch.randn(2, 3, 16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            return (model(noise, TIME).sample.float() - noise).pow(2).mean()

    run.train(model, loss)
