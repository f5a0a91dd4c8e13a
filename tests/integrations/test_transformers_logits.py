"""A Trainer's loss without logits: what it saves, what is logged of it, and where logits are there all the same."""

import pytest
import torch
from tiers import slow
from torch import nn
from torch.nn import functional as F
from trainer_testing import (
    BATCH,
    LENGTH,
    MANY,
    STEPS,
    VOCABULARY,
    MeasuredTrainer,
    arguments,
    logged,
    model,
    texts,
    trained,
)
from transformers import Trainer, TrainerCallback

from recompute.errors import PolicyWarning, UnsupportedError
from recompute.integrations.transformers import RecomputeCallback, RecomputeTrainingArguments, refuse_arguments
from recompute.substitution.lazy_logits import LazyLogits

HEAD = {"name": "head", "rules": [{"match": "lm_head", "action": "recompute", "via": "kernel"}]}


@pytest.mark.parametrize("policy", ["auto", *slow("elementwise", "none")])
def test_the_peak_falls(policy, tmp_path):
    plain = trained(tmp_path, RecomputeCallback(policy), of=model(MANY))
    options = {"recompute_policy": policy, "recompute_kwargs": {"logits": False}}
    found = trained(tmp_path, of=model(MANY), kind=RecomputeTrainingArguments, **options)
    whole = BATCH * LENGTH * MANY * 4
    assert min(plain.peaks) - max(found.peaks) > whole
    assert logged(found, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert logged(found, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)
    assert logged(plain, "token_accuracy") == []


@pytest.mark.gpu
def test_peak_and_held_memory_fall_on_cuda_and_are_logged(tmp_path):
    found = []
    for callback in (RecomputeCallback("none"), RecomputeCallback("auto"), RecomputeCallback("auto", logits=False)):
        options = {"use_cpu": False, "bf16": True}
        trainer = Trainer(model(MANY), arguments(tmp_path, **options), train_dataset=texts(), callbacks=[callback])
        trainer.train()
        found.append([logged(trainer, key)[-1] for key in ("recompute_held_nbytes", "recompute_peak_nbytes")])
    none, auto, without = found
    for policed in (auto, without):
        assert policed[0] < none[0]
        assert policed[1] < none[1]


class Looks(TrainerCallback):
    """Evaluates, generates and asks for gradients-off logits in the middle of training."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, model=None, **_):
        ids = texts(1)[0]["input_ids"][None]
        model.eval()
        output = model(input_ids=ids, labels=ids)
        assert type(output.logits) is torch.Tensor
        assert output.logits.shape == (1, LENGTH, VOCABULARY)
        expected = F.cross_entropy(output.logits[0, :-1], ids[0, 1:])
        torch.testing.assert_close(output.loss, expected)
        self.found.append(model.generate(input_ids=ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0))
        model.train()


def test_logits_are_whole_in_evaluation_metrics_and_generation(tmp_path):
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"sum": float(abs(prediction.predictions).sum())}

    found = {}
    for logits in (None, False):
        looks = Looks()
        trainer = MeasuredTrainer(
            model(),
            arguments(tmp_path, eval_strategy="steps", eval_steps=1),
            callbacks=[RecomputeCallback("elementwise", logits=logits), looks],
            compute_metrics=metrics,
        )
        trainer.train()
        found[logits] = (logged(trainer, "eval_sum"), [ids.tolist() for ids in looks.found])
    assert shapes == [(4, LENGTH, VOCABULARY)] * 2 * STEPS
    assert found[False][0] == pytest.approx(found[None][0], rel=1e-4)
    assert found[False][1] == found[None][1]


class Asks(Trainer):
    """Notes what the training forward returns as logits."""

    def __init__(self, *given, **options):
        super().__init__(*given, train_dataset=texts(), **options)
        self.kinds = set()

    def compute_loss(self, *given, **options):
        loss, outputs = super().compute_loss(*given, return_outputs=True, **options)
        self.kinds.add(type(outputs.logits))
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(("logits", "kind"), [(None, LazyLogits), (False, LazyLogits), (True, torch.Tensor)])
@pytest.mark.parametrize("policy", [HEAD, {"rules": [*HEAD["rules"], {"match": "model", "action": "keep"}]}])
def test_the_switch_goes_before_the_policy(policy, logits, kind, tmp_path):
    trainer = Asks(model(), arguments(tmp_path), callbacks=[RecomputeCallback(policy, logits=logits)])
    trainer.train()
    assert trainer.kinds == {kind}
    assert bool(logged(trainer, "token_accuracy")) is (kind is LazyLogits)


def that_reads_logits(logits, labels):
    return logits.tanh().mean()


def that_reads_logits_too(logits, labels):
    """Beside a cross-entropy of some of the logits."""
    return F.cross_entropy(logits[:1, :-1].flatten(0, 1), labels[:1, 1:].flatten()) + that_reads_logits(logits, labels)


@pytest.mark.parametrize(
    ("loss", "why"), [(that_reads_logits, "no loss that kernels"), (that_reads_logits_too, "code beside the loss")]
)
def test_a_loss_that_does_not_go_that_way_is_told_of(loss, why, tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return loss(outputs.logits, labels)

    trainer = MeasuredTrainer(
        model(), arguments(tmp_path), callbacks=[RecomputeCallback(logits=False)], compute_loss_func=loss_of
    )
    with pytest.warns(PolicyWarning, match=rf"logits=False has no effect: .*{why}.*or drop logits=False") as caught:
        trainer.train()
    assert len([each for each in caught if each.category is PolicyWarning]) == 1
    assert bool(logged(trainer, "token_accuracy")) is (loss is that_reads_logits_too)


class Around(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, input_ids, labels):
        return self.inner[0](input_ids=input_ids, labels=labels)


def test_a_head_inside_of_a_model_around_it_is_found(tmp_path):
    found = trained(tmp_path, RecomputeCallback("elementwise", logits=False), of=Around(model()))
    assert len(logged(found, "token_accuracy")) == STEPS


def test_a_model_without_a_head_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="Around has no output embeddings"):
        trained(tmp_path, RecomputeCallback(logits=False), of=Around(model().model))
    with pytest.raises(UnsupportedError, match=r"one head; Around has 'inner.0.lm_head', 'inner.1.lm_head'\."):
        trained(tmp_path, RecomputeCallback(logits=False), of=Around(model(), model()))


def test_replicas_that_copy_what_the_model_returns_are_refused():
    class Arguments:
        world_size, n_gpu = 2, 1
        ddp_find_unused_parameters: bool | None = None

    with pytest.raises(UnsupportedError, match="needs ddp_find_unused_parameters=False"):
        refuse_arguments(Arguments(), False)
    refuse_arguments(Arguments(), None)
    Arguments.n_gpu = 2
    with pytest.raises(UnsupportedError, match="Start one process for each GPU"):
        refuse_arguments(Arguments(), False)
    Arguments.n_gpu = 1
    Arguments.ddp_find_unused_parameters = False
    refuse_arguments(Arguments(), False)
