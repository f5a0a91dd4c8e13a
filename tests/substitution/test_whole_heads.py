"""Under a policy that may round, attention with one head of keys runs by fused kernels: Falcon's under `auto`."""

import pytest
import torch
from tiny import counted_ops
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.substitution import whole_heads
from recompute.substitution.whole_heads import WholeHeads


class SharedKeys(nn.Module):
    """Attention of several heads of queries to one head of keys and values."""

    def __init__(self, heads=4, width=16):
        super().__init__()
        self.heads, self.width = heads, width
        self.project = nn.Linear(heads * width, (heads + 2) * width)
        self.out = nn.Linear(heads * width, heads * width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        query, keys = self.project(x).split([self.heads * self.width, 2 * self.width], -1)
        query = query.view(batch, tokens, self.heads, self.width).transpose(1, 2)
        key, value = keys.view(batch, tokens, 2, self.width).transpose(1, 2).split(1, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    ("key_heads", "dtype", "heads"),
    [(1, torch.bfloat16, 4), (2, torch.bfloat16, 2), (1, torch.float32, 1)],
    ids=["one head", "two heads", "float32"],
)
def test_only_one_head_of_keys_in_16_bits_is_copied(key_heads, dtype, heads, monkeypatch):
    monkeypatch.setattr(whole_heads, "is_on_cuda", lambda tensor: True)
    query, key = torch.randn(2, 4, 8, 16, dtype=dtype), torch.randn(2, key_heads, 8, 16, dtype=dtype)
    assert whole_heads.whole_heads(query, key, key)[0].shape[1] == heads


def test_attention_is_the_same_with_whole_heads(monkeypatch):
    monkeypatch.setattr(whole_heads, "is_on_cuda", lambda tensor: True)
    block = SharedKeys().bfloat16()
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    expected = block(x)
    with WholeHeads(), counted_ops() as counts:
        found = block(x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert "aten._safe_softmax" not in counts
    assert any("flash_attention" in name for name in counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("via", "writes_scores"), [("auto", False), ("hook", True)])
def test_a_policy_that_may_round_writes_no_scores(via, writes_scores):
    torch.manual_seed(0)
    block = SharedKeys(heads=8, width=64).to("cuda", torch.bfloat16)
    plain = [parameter.detach().clone() for parameter in block.parameters()]
    recompute.apply(block, {"rules": [{"type": "SharedKeys", "action": "recompute", "via": via}]})
    scores = 8 * 2048 * 2048 * 4
    for step in range(8):
        x = torch.randn(1, 2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        block(x).float().square().mean().backward()
        assert (torch.cuda.max_memory_allocated() - before > scores) is writes_scores, step
        assert x.grad.isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(plain, block.parameters(), strict=True))
