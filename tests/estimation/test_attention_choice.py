"""The kernel of attention that is assumed is the one that torch chooses, and takes what was measured."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from recompute.engine.fake_mode import FakeMode
from recompute.estimation.attention_choice import NAMES, Attention, Platform, choose
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.gpus import find_gpu
from recompute.estimation.storage_tracker import BLOCK_NBYTES, StorageTrace

H100 = Platform("H100", (9, 0), 91900, (2, 11))
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture
def nowhere(monkeypatch):
    """No device is here, so that conditions are calculated."""
    monkeypatch.setattr(Platform, "is_here", False)


def call(
    dtype=HALF,
    sizes=(64, 64),
    heads=(8, 8),
    *,
    mask=None,
    bools=False,
    causal=False,
    dropout=0.0,
    gqa=False,
    length=256,
    device="meta",
):
    def rows(*shape):
        return torch.empty(shape[-1], dtype=dtype, device=device).requires_grad_().expand(shape)

    (size, value_size), (count, key_count) = sizes, heads
    query, key = rows(2, count, length, size), rows(2, key_count, length, size)
    given = None if mask is None else torch.empty(mask, dtype=torch.bool if bools else dtype, device=device)
    return Attention(query, key, rows(2, key_count, length, value_size), given, dropout, causal, gqa)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [
        (H100, {}, "cuDNN"),
        (H100, {"causal": True, "dropout": 0.1}, "cuDNN"),
        (H100, {"sizes": (192, 128)}, "cuDNN"),  # DeepSeek V3
        (H100, {"sizes": (256, 256)}, "cuDNN"),
        (H100, {"sizes": (100, 100)}, "flash"),  # no multiple of 8
        (H100, {"sizes": (100, 100), "mask": (256, 256)}, "math"),
        (H100, {"sizes": (512, 512)}, "efficient"),
        (H100, {"mask": (2, 1, 256, 256), "bools": True}, "cuDNN"),
        (H100, {"dtype": FULL, "sizes": (192, 128)}, "efficient"),
        (H100, {"heads": (8, 2), "gqa": True}, "cuDNN"),
        (H100, {"heads": (8, 2)}, "math"),
        (H100, {"heads": (8, 1)}, "math"),  # Falcon 7B
        (H100, {"dtype": FULL, "heads": (8, 2), "gqa": True}, "math"),
        (H100, {"length": 1}, "flash"),
        (H100._replace(torch=(2, 14)), {"heads": (8, 1)}, "cuDNN"),
        (H100._replace(torch=(2, 14), cudnn=92400), {"sizes": (192, 192)}, "flash"),  # cuDNN has no backward for it
        (H100._replace(torch=(2, 14)), {"dtype": FULL, "heads": (8, 2), "gqa": True}, "efficient"),
        (H100._replace(cudnn=91000), {}, "flash"),
        (H100._replace(cudnn=91000), {"sizes": (192, 128)}, "efficient"),
        (H100._replace(capability=(8, 0)), {"mask": (2, 1, 256, 256)}, "efficient"),
        (H100._replace(capability=(8, 9)), {"sizes": (256, 256), "dropout": 0.1}, "efficient"),
        (H100._replace(capability=(8, 9)), {"sizes": (256, 256)}, "flash"),
    ],
)
def test_the_choice_is_torchs(platform, given, expected):
    """The rows for an H100 with torch 2.11 and cuDNN 9.19 are what torch answered there, the others its conditions."""
    assert NAMES[choose(call(**given), platform)] == expected


@pytest.mark.usefixtures("nowhere")
def test_what_is_switched_off_is_not_chosen():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose(call(), H100) == SDPBackend.EFFICIENT_ATTENTION
        with pytest.raises(RuntimeError, match="No available kernel"):
            choose(call(sizes=(100, 100)), H100)


@pytest.mark.gpu
def test_the_device_here_answers_as_calculated(monkeypatch):
    platform, wrong = Platform.of(None), []
    masks = [{}, {"mask": (256, 256)}, {"mask": (2, 1, 256, 256), "bools": True}, {"causal": True}]
    sizes = [(64, 64), (100, 100), (128, 128), (192, 128), (192, 192), (256, 256), (128, 64), (512, 512)]
    heads = [(8, 8), (8, 2), (8, 1)]
    for dtype, size, count, gqa, dropout, mask in product(
        (HALF, FULL), sizes, heads, (False, True), (0.0, 0.1, 0.125), masks
    ):
        given = {"dtype": dtype, "sizes": size, "heads": count, "gqa": gqa, "dropout": dropout, **mask}
        told = choose(call(**given, device="cuda"), platform)
        with monkeypatch.context() as patched:
            patched.setattr(Platform, "is_here", False)
            calculated = choose(call(**given), platform)
        if told != calculated:
            wrong.append((given, told, calculated))
    assert not wrong


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("backend", "heads", "size", "value_size", "has_mask", "held", "backward"),
    [
        (SDPBackend.FLASH_ATTENTION, (32, 8), 128, 128, False, 525312, 185073664),
        (SDPBackend.FLASH_ATTENTION, (8, 1), 256, 256, False, 132096, 88211456),
        (SDPBackend.EFFICIENT_ATTENTION, (32, 32), 128, 128, True, 17301504, 168312832),
        (SDPBackend.EFFICIENT_ATTENTION, (8, 8), 256, 256, False, 131072, 109199360),
        (SDPBackend.CUDNN_ATTENTION, (32, 8), 128, 128, True, 17302528, 185074176),
        (SDPBackend.CUDNN_ATTENTION, (8, 8), 256, 256, False, 132096, 84017664),
    ],
)
def test_kernels_take_what_was_measured(backend, heads, size, value_size, has_mask, held, backward):
    """Bytes on an H100 with torch 2.11, for two sequences of 2048: held beside the output; and the peak of backward."""
    with FakeMode(), as_on_cuda(H100), sdpa_kernel(backend):
        shapes = ((heads[0], size), (heads[1], size), (heads[1], value_size))
        given = [torch.empty(2, 2048, *shape, dtype=HALF).transpose(1, 2).requires_grad_() for shape in shapes]
        mask = torch.ones(2, 1, 2048, 2048, dtype=torch.bool) if has_mask else None
        with StorageTrace(BLOCK_NBYTES) as trace:
            output = F.scaled_dot_product_attention(
                *given, attn_mask=mask, is_causal=not has_mask, enable_gqa=heads[0] != heads[1]
            )
            after = trace.alive_nbytes
            assert after - output.untyped_storage().nbytes() == pytest.approx(held, abs=2 * BLOCK_NBYTES)
        gradient = torch.empty_like(output)
        with StorageTrace(BLOCK_NBYTES) as trace:
            torch.autograd.backward(output, gradient)
        assert trace.peak_nbytes == pytest.approx(backward, abs=2 * BLOCK_NBYTES)


def test_every_gpu_has_a_capability():
    assert find_gpu("A100").capability == (8, 0)
    assert Platform.of(find_gpu("MI300X")).cudnn is None
