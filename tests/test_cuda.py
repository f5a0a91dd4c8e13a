"""On a CUDA device: what runs again there is bitwise the same too, with dropout, flash attention and autocast."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import recompute

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def whole_layers(**options):
    return {"rules": [{"type": "*DecoderLayer", **options}]}


EXACT = {
    **{preset: preset for preset in ("full", "alternate", "hook", "elementwise")},
    "with GEMMs": whole_layers(action="recompute", via="hook", rerun=["gemm"]),
    "with attention": whole_layers(action="recompute", via="hook", rerun=["gemm", "attention"]),
    "all but attention": whole_layers(action="checkpoint", keep=["attention"]),
}

LEAN = {name: policy for name, policy in EXACT.items() if name != "alternate"} | {"kernel": "kernel", "auto": "auto"}


def llama(dtype, dropout):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype)


def train(model, autocast):
    """The loss and all gradients of one step, and the CUDA generator's state after it."""
    torch.manual_seed(1)
    ids = torch.randint(0, 256, (2, 256), device="cuda")
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], torch.cuda.get_rng_state()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [*DTYPES, "autocast"], ids=str)
def test_gradients_are_bitwise_those_without_the_policy(dtype, dropout, policy):
    autocast = dtype == "autocast"
    model = llama(torch.float32 if autocast else dtype, dropout)
    expected, stream = train(model, autocast)
    with recompute.apply(model, policy) as handle:
        found, stream_under_policy = train(model, autocast)
        assert handle.stats().regenerations > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(stream, stream_under_policy), "the random stream goes on from where it would be"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", ["full", "elementwise", "with attention"])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=lambda b: b.name)
def test_flash_and_cudnn_attention_come_back_bitwise(backend, policy):
    model = llama(torch.bfloat16, 0.0)
    torch.use_deterministic_algorithms(backend is SDPBackend.FLASH_ATTENTION)
    with sdpa_kernel(backend):
        expected, _ = train(model, False)
        again, _ = train(model, False)
        if not all(map(torch.equal, again, expected)):
            pytest.skip(f"{backend.name} is not deterministic on this device even without a policy")
        with recompute.apply(model, EXACT[policy]):
            found, _ = train(model, False)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("policy", LEAN.values(), ids=LEAN)
def test_a_policy_holds_less_and_peaks_lower(policy):
    model = llama(torch.bfloat16, 0.0)
    ids = torch.randint(0, 256, (4, 1024), device="cuda")

    def memory():
        model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, torch.cuda.max_memory_allocated() - before

    held, peak = memory()
    with recompute.apply(model, policy):
        held_under_policy, peak_under_policy = memory()
    assert held_under_policy < 0.75 * held
    assert peak_under_policy < peak


@pytest.mark.parametrize("policy", ["kernel", "auto"])
def test_kernels_change_gradients_no_more_than_bf16_itself_does(policy):
    model = llama(torch.bfloat16, 0.0)
    reference = llama(torch.float32, 0.0)
    exact, _ = train(reference, False)
    eager, _ = train(model, False)
    with recompute.apply(model, policy) as handle:
        kernel, _ = train(model, False)
        assert handle.stats().regenerations > 0

    def error(found):
        return sum((a.float() - b).square().sum().item() for a, b in zip(found[1:], exact[1:], strict=True)) ** 0.5

    assert error(kernel) <= 1.05 * error(eager)
