"""A decoder small enough for tests, written as Hugging Face writes Llama's, and one way to train and to compare."""

import io
from collections import Counter
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HIDDEN, INTERMEDIATE, VOCABULARY = 16, 24, 32
BATCH, LENGTH = 2, 6
TOKENS = BATCH * LENGTH


class TinyRMSNorm(nn.Module):
    def __init__(self, hidden=HIDDEN, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)
        self.eps = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(dtype)


class TinyMLP(nn.Module):
    def __init__(self, bias=False, hidden=HIDDEN, intermediate=INTERMEDIATE):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Adapter(nn.Module):
    """A low-rank adapter around a Linear."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class TinyAttention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        dropout = self.dropout if self.training else 0.0
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True))


class TinyDecoderLayer(nn.Module):
    def __init__(self, bias=False, dropout=0.0):
        super().__init__()
        self.input_layernorm = TinyRMSNorm()
        self.self_attn = TinyAttention(dropout)
        self.post_attention_layernorm = TinyRMSNorm()
        self.mlp = TinyMLP(bias)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TinyDecoder(nn.Module):
    def __init__(self, layers=2, bias=False, dropout=0.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(TinyDecoderLayer(bias, dropout) for _ in range(layers))
        self.norm = TinyRMSNorm()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, scale=1.0):
        hidden_states = self.embed_tokens(ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.lm_head(self.norm(hidden_states)) * scale


def decoder(seed=0, **options):
    torch.manual_seed(seed)
    return TinyDecoder(**options)


def token_ids():
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def next_token_loss(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, loss_of=None, *, steps=2):
    """For each step of SGD the loss and every gradient there is, always from the same random state."""
    ids = token_ids()
    torch.manual_seed(1)
    outcome = []
    for _ in range(steps):
        loss = next_token_loss(model, ids) if loss_of is None else loss_of()
        loss.backward()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        outcome.append([loss.detach(), *(parameter.grad.clone() for parameter in parameters)])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return outcome


def gradients(function, *inputs, seed=0):
    """The output of ``function`` and the gradients of its sum with respect to ``inputs``."""
    torch.manual_seed(seed)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]


def assert_same(found, expected):
    """Bit for bit, also inside nested lists."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
        else:
            assert_same(one, other)


def through_torch_save(value, *, weights_only=True):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def assert_as_under(preset, found, expected):
    """Bit for bit, but under kernels, which round in their own way."""
    if preset != "kernel":
        assert_same(found, expected)
    torch.testing.assert_close(found, expected)


def rules(*given):
    return {"rules": list(given) or "none"}


def rule(type_name, action="checkpoint", **others):
    return {"type": type_name, "action": action, **others}


def snapshot(model):
    """Each module's class and attributes, to compare with ``==``: equal tensors are the same tensors."""
    return {
        name: (type(module), {key: dict(v) if isinstance(v, dict) else v for key, v in vars(module).items()})
        for name, module in model.named_modules(remove_duplicate=False)
    }


def classes(model):
    """Each module's class, which an applied policy changes."""
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


@contextmanager
def counted_ops():
    """How often each ATen or custom op runs, by its name without the overload."""
    counts = Counter()

    class Count(TorchDispatchMode):
        __module__ = "recompute.testing"  # the engine trusts it then, as it does torch's own modes, and shows it all
        supports_higher_order_operators = True

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            inner = args[1] if isinstance(op, HigherOrderOperator) else op  # of run_with_rng_state(state, op, *args)
            counts[str(inner.overloadpacket)] += 1
            return op(*args, **(kwargs or {}))

    with Count():
        yield counts


class WideTensors(TorchDispatchMode):
    """Notes each op that gives a tensor as wide as a vocabulary, and the shape of that tensor."""

    __module__ = "recompute.testing"  # the engine trusts it then, as it does torch's own modes

    def __init__(self, words):
        super().__init__()
        self.words, self.found = words, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor) and each.dim() > 1]
        self.found += [(str(op), each.shape) for each in tensors if each.shape[-1] == self.words]
        return results


def of_one_more(run, handle):
    """The stats of a run in which every region knows its plan: before it may have begun with another region's."""
    before = handle.stats()
    run()
    return handle.stats() - before
