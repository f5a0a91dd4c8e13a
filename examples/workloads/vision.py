"""timm's and torchvision's models of images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from small_models import image
from torch import Tensor, nn
from workload import Run, workload

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
STAGES = {"depths": (1, 1, 1, 1)}

# timm's models, each made small by its own arguments, by the name of the row; or classes, where no model of a name is.
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {**VIT, "drop_path_rate": 0.2, "drop_rate": 0.1}),
    "vit, pooled by attention": ("vit_base_patch16_siglip_224", {**VIT, "global_pool": "map"}),
    "vit with registers and layer scale": ("vit_small_patch14_reg4_dinov2", {**VIT, "init_values": 0.1}),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", {**VIT, "drop_path_rate": 0.2}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "window_size": 4,
            "embed_dim": 24,
            "depths": (2, 2),
            "num_heads": (2, 4),
            "drop_path_rate": 0.2,
        },
    ),
    "swin v2": (
        "swinv2_tiny_window8_256",
        {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "convnext": ("convnext_atto", {**STAGES, "dims": (16, 24, 32, 40), "drop_path_rate": 0.2}),
    "convnext v2": ("convnextv2_atto", {**STAGES, "dims": (16, 24, 32, 40)}),
    "efficientnet": ("test_efficientnet", {"drop_path_rate": 0.2, "drop_rate": 0.1}),
    "mobilenet v3": ("mobilenetv3_small_050", {}),
    "resnet": ("resnet18", {"channels": (16, 16, 32, 32), "drop_path_rate": 0.1}),
    "resnet with squeeze and excitation": ("seresnet18", {"channels": (16, 16, 32, 32)}),
    "resnet v2 with standardized weights": (
        "resnetv2.ResNetV2",
        {"layers": (1, 1), "channels": (128, 128), "stem_chs": 32, "drop_path_rate": 0.1},
    ),
    "mixer": ("mlp_mixer.MlpMixer", {"img_size": 64, "embed_dim": 48, "num_blocks": 3, "drop_path_rate": 0.2}),
    "beit": ("beit_base_patch16_224", {**VIT, "drop_path_rate": 0.2}),
    "eva": ("eva02_tiny_patch14_224", {**VIT, "drop_path_rate": 0.2}),
    "maxvit": ("maxvit_rmlp_pico_rw_256", {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64)}),
    "regnet": ("regnety_002", {"drop_path_rate": 0.1}),
    "cait": ("cait_xxs24_224", {**VIT, "drop_path_rate": 0.1}),
    "metaformer": ("metaformer.MetaFormer", {**STAGES, "dims": (16, 24, 32, 40), "drop_path_rate": 0.1}),
    "pvt v2": ("pvt_v2_b0", {**STAGES, "drop_path_rate": 0.1}),
    "coat": ("coat_lite_tiny", {"img_size": 32, "embed_dims": (16, 32, 32, 32), "serial_depths": (1, 1, 1, 1)}),
    "davit": ("davit_tiny", {"depths": (1, 1), "embed_dims": (24, 48), "num_heads": (2, 4), "drop_path_rate": 0.1}),
    "hiera": ("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 24, "stages": (1, 1, 2, 1)}),
    "mobilevit": ("mobilevit_xxs", {}),
    "edgenext": ("edgenext_xx_small", {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48), "drop_path_rate": 0.1}),
    "normalizer-free": ("test_nfnet", {}),
    "gated convolutions (MambaOut)": ("test_mambaout", {}),
    "xcit": ("xcit_nano_12_p16_224", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}),
}


def supervised(run: Run, model: Any, batch: Callable[[], Tensor] = lambda: image(32)) -> None:
    run.govern(model)

    def loss() -> Tensor:
        output = model(batch())
        outputs = output if isinstance(output, (tuple, list)) else [output]
        targets = torch.randint(0, 8, (len(outputs[0]),))
        return torch.stack([nn.functional.cross_entropy(each, targets, label_smoothing=0.1) for each in outputs]).sum()

    run.train(model, loss)


def define_timm(name: str, kind: str, options: dict[str, Any]) -> None:
    @workload("timm", name)
    def train(run: Run) -> None:
        import timm

        size = options.get("img_size", 64)
        size = size if isinstance(size, int) else size[0]
        module, _, name = kind.rpartition(".")
        make = getattr(getattr(timm.models, module), name) if module else functools.partial(timm.create_model, kind)
        model = make(num_classes=8, **options)
        if hasattr(model, "set_distilled_training"):
            model.set_distilled_training()
        supervised(run, model, lambda: image(size))


for name, (kind, options) in TIMM.items():
    define_timm(name, kind, options)


@workload("timm", "vit with its own checkpoints")
def vit_with_checkpoints(run: Run) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=8, **VIT)
    model.set_grad_checkpointing()
    supervised(run, model)


@workload("timm", "an average of the weights, mixup and drop path")
def ema(run: Run) -> None:
    import timm
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    model = timm.create_model("vit_tiny_patch16_224", num_classes=8, **VIT, drop_path_rate=0.2)
    mixed = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=8)
    average = ModelEmaV3(model, decay=0.9)
    run.govern(model)

    def loss() -> Tensor:
        average.update(model)
        images, targets = mixed(image(), torch.randint(0, 8, (2,)))
        return SoftTargetCrossEntropy()(model(images), targets)

    run.train(model, loss)


TORCHVISION: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet18": ("resnet18", {}, 32),
    "mobilenet v2": ("mobilenet_v2", {"width_mult": 0.25}, 32),
    "shufflenet": ("shufflenet_v2_x0_5", {}, 32),
    "regnet": ("regnet_x_400mf", {}, 32),
}


def define_torchvision(name: str, kind: str, options: dict[str, Any], size: int) -> None:
    @workload("torchvision", name)
    def train(run: Run) -> None:
        import torchvision

        supervised(run, getattr(torchvision.models, kind)(num_classes=8, **options), lambda: image(size))


for name, (kind, options, size) in TORCHVISION.items():
    define_torchvision(name, kind, options, size)


@workload("torchvision", "densenet, which saves memory by checkpoints")
def densenet(run: Run) -> None:
    from torchvision.models import DenseNet

    supervised(run, DenseNet(8, (2, 2), 16, num_classes=8, memory_efficient=True))


@workload("torchvision", "vision transformer")
def vision_transformer(run: Run) -> None:
    from torchvision.models import VisionTransformer

    supervised(run, VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, num_classes=8))


@workload("torchvision", "swin transformer v2")
def swin(run: Run) -> None:
    from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2

    model = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=8, block=SwinTransformerBlockV2)
    supervised(run, model)


@workload("torchvision", "segmentation (LRASPP)")
def segmentation(run: Run) -> None:
    import torchvision

    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    run.govern(model)
    run.train(model, lambda: nn.functional.cross_entropy(model(image(64))["out"], torch.randint(0, 4, (2, 64, 64))))


@workload("torchvision", "detection (Faster R-CNN)")
def detection(run: Run) -> None:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import mobilenet_backbone

    backbone = mobilenet_backbone(backbone_name="mobilenet_v3_small", weights=None, fpn=True, trainable_layers=6)
    anchors = AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3)
    model = FasterRCNN(backbone, num_classes=4, min_size=64, max_size=96, rpn_anchor_generator=anchors)
    run.govern(model)
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 20.0, 50.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(2)]

    def loss() -> Tensor:
        return torch.stack(list(model(list(image(64)), targets).values())).sum()

    run.train(model, loss)


@workload("torchvision", "video (R3D)")
def video(run: Run) -> None:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    model = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=8)
    supervised(run, model, lambda: torch.randn(2, 3, 4, 16, 16))
