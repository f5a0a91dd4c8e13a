"""Heads that kernels compute: training makes no logits, whoever takes the loss, and evaluation makes them."""

import pytest
import torch
import transformers
from models import BATCH, LENGTH, SHAPE, VOCABULARY, held
from models import LAYERS_BY_KERNELS as POLICY
from tiers import slow
from torch import Tensor
from torch.nn import functional as F

import recompute
from recompute.substitution.lazy_logits import LazyLogits

TOKENS = BATCH * LENGTH
LAYERS = 1  # the others are as the first
IDS = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def make(name="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, "num_hidden_layers": LAYERS, **options})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def loss_of(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def test_training_makes_no_logits_and_evaluation_does():
    model = make()
    recompute.apply(model, POLICY)
    output = model(input_ids=IDS, labels=IDS)
    assert type(output.logits) is LazyLogits
    assert output.logits.is_lazy
    expected = make()(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits + 0, expected.logits)
    with torch.no_grad():
        output = model(input_ids=IDS, labels=IDS)
        assert output.logits.is_lazy
        torch.testing.assert_close(output.loss, expected.loss)
    with torch.inference_mode():
        assert type(model(input_ids=IDS, labels=IDS).logits) is Tensor
    assert type(model.eval()(input_ids=IDS, labels=IDS).logits) is Tensor


def test_without_logits_a_step_holds_less():
    vocabulary = 4096
    model, plain = (make(vocab_size=vocabulary) for _ in range(2))
    recompute.apply(model, POLICY)
    without = held(model, lambda: loss_of(model))
    assert held(plain, lambda: loss_of(plain)) - without > TOKENS * vocabulary * 4


@pytest.mark.parametrize("name", ["Llama", *slow("Cohere", "Granite", "Gemma2")])
def test_log_probabilities_and_entropies_of_ones_own_go_without_logits_too(name):
    def loss(model):
        logits = model(input_ids=IDS, use_cache=False).logits
        scores = F.log_softmax(logits[:, :-1] / 0.7, -1)
        entropy = -(scores.exp() * scores).sum(-1)
        assert type(logits) is Tensor or logits.is_lazy
        return (scores.gather(-1, IDS[:, 1:, None]).squeeze(-1) - 0.01 * entropy).mean()

    model, plain = make(name), make(name)
    recompute.apply(model, POLICY)
    found, expected = loss(model), loss(plain)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
