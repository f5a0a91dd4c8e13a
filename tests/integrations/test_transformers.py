"""Hugging Face's Trainer under a policy: by a callback, by its arguments; what is refused; what is saved."""

import copy
import json
import pickle
from dataclasses import dataclass

import pytest
import torch
import trainer_testing
from tiers import by_default, slow
from tiny import classes
from torch import nn
from torch.nn import functional as F
from trainer_testing import LENGTH, MANY, STEPS, VOCABULARY, MeasuredTrainer, arguments, logged, model, texts, trained
from transformers import HfArgumentParser, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from recompute.errors import PolicyError, PolicyWarning, UnsupportedError
from recompute.integrations import transformers as integration
from recompute.integrations.transformers import (
    RecomputeArguments,
    RecomputeCallback,
    RecomputeTrainingArguments,
    refuse_arguments,
)
from recompute.substitution.lazy_logits import LazyLogits

LAYERS = {"name": "layers", "rules": [{"match": "model.layers.*", "action": "checkpoint"}]}


@dataclass
class OtherArguments(TrainingArguments):
    """Arguments of another Trainer, as TRL's are."""

    max_length: int = 1024


@dataclass
class MixedArguments(RecomputeArguments, OtherArguments):
    pass


each_dtype = pytest.mark.parametrize("precision", by_default({"float32": {}, "autocast": {"bf16": True}}, "autocast"))
WAYS = {
    "callback": lambda policy: {"callbacks": [RecomputeCallback(policy)], "kind": TrainingArguments},
    "arguments": lambda policy: {"kind": RecomputeTrainingArguments, "recompute_policy": policy},
    "mixed": lambda policy: {"kind": MixedArguments, "recompute_policy": policy},
}


@pytest.mark.parametrize("way", by_default(list(WAYS), "callback"))
@each_dtype
def test_memory_falls_and_not_a_bit_changes(way, precision, tmp_path):
    plain = trained(tmp_path, **precision)
    options = WAYS[way]("elementwise")
    found = trained(tmp_path, *options.pop("callbacks", []), **options, **precision)
    assert len(found.held) == len(plain.held) == STEPS * trainer_testing.ACCUMULATED
    assert max(found.held) < 0.8 * min(plain.held)
    assert max(found.peaks) < min(plain.peaks)
    assert logged(found, "loss") == logged(plain, "loss")
    assert logged(found, "grad_norm") == logged(plain, "grad_norm")
    trainer_testing.assert_same_weights(found, plain)


@pytest.mark.slow
def test_compiled_models_obey_it_too(tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain = trained(tmp_path, **options)
    found = trained(tmp_path, RecomputeCallback("elementwise"), **options)
    assert max(found.held) < 0.9 * min(plain.held)
    assert logged(found, "loss") == logged(plain, "loss")
    assert logged(found, "recompute_dropped_nbytes") == []  # the compiler alone knows


@pytest.mark.slow
def test_a_cache_is_refused_where_its_writers_are_compiled(tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    with pytest.raises(UnsupportedError, match=r"torch_compile=True: .* writes to a key/value cache.*Set use"):
        trained(tmp_path, RecomputeCallback("elementwise"), use_cache=True, **options)
    trainer = MeasuredTrainer(model(), arguments(tmp_path, **options), callbacks=[RecomputeCallback("elementwise")])
    trainer.model.config.use_cache = True  # after the Trainer has put there what its arguments say
    with pytest.raises(UnsupportedError, match="use_cache=False in both, or drop torch_compile or the policy"):
        trainer.train()
    found = trained(tmp_path, RecomputeCallback("elementwise"), use_cache=True)
    assert min(logged(found, "recompute_dropped_nbytes")) > 0


class Reports(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(dict(logs))


def test_what_reports_sees_the_logs_of_a_policy_in_the_arguments(tmp_path, monkeypatch):
    monkeypatch.setitem(integration.integration_utils.INTEGRATION_TO_CALLBACK, "theirs", Reports)
    options = {"recompute_policy": "elementwise", "report_to": "theirs"}
    trainer = trained(tmp_path, kind=RecomputeTrainingArguments, **options)
    (reports,) = [callback for callback in trainer.callback_handler.callbacks if type(callback) is Reports]
    assert trainer.args.report_to == ["recompute", "theirs"]
    assert all("recompute_dropped_nbytes" in logs for logs in reports.seen if "loss" in logs)
    assert len(logged(trainer, "recompute_dropped_nbytes")) == STEPS


def test_an_exception_leaves_nothing_behind_that_the_next_training_minds(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if stops:
                raise KeyboardInterrupt

    stops = [True]
    llama = model()
    expected = classes(llama)
    callback = RecomputeCallback("elementwise")
    trainer = MeasuredTrainer(llama, arguments(tmp_path, bf16=True), callbacks=[callback, Stop()])
    with callback, pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert classes(llama) == expected
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    stops.clear()
    trainer.train()
    assert callback.handle is None
    assert classes(llama) == expected


REFUSED = {
    "checkpointing": ({"gradient_checkpointing": True}, {}, "Set gradient_checkpointing=False .*or drop the policy"),
    "liger": ({"use_liger_kernel": True}, {}, "Set use_liger_kernel=False .*or drop the policy"),
    "smoothing": (
        {"label_smoothing_factor": 0.1},
        {"logits": False},
        "label_smoothing_factor=0.1 .*logits=False leaves out. Drop one of the two",
    ),
    "compiling": ({"torch_compile": True}, {"logits": False}, "torch_compile=True .*Drop one of the two"),
}


@pytest.mark.parametrize(("others", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_fight_it_is_refused(others, options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_liger_kernel_available", lambda: True, raising=False)
    with pytest.raises(UnsupportedError, match=message):
        arguments(
            tmp_path, RecomputeTrainingArguments, recompute_policy="elementwise", recompute_kwargs=options, **others
        )
    with pytest.raises(UnsupportedError, match=message):
        Trainer(model(), arguments(tmp_path, **others), callbacks=[RecomputeCallback(**options)])
    arguments(tmp_path, RecomputeTrainingArguments, **others)  # no policy, nothing to refuse


def test_more_that_is_refused(tmp_path):
    both = arguments(tmp_path, RecomputeTrainingArguments, recompute_policy="elementwise")
    with pytest.raises(UnsupportedError, match=r"two policies.*Drop one of"):
        Trainer(model(), both, callbacks=[RecomputeCallback()])
    with pytest.raises(UnsupportedError, match="recompute_policy is None, so it has no effect"):
        arguments(tmp_path, RecomputeTrainingArguments, recompute_kwargs={"logits": False})


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("elementwize", {}, "did you mean 'elementwise'"),
        ("elementwise", {"logit": False}, "recompute_kwargs: logit: .*did you mean 'logits'"),
        ("elementwise", {"kernels": "yes"}, "recompute_kwargs: kernels: expected true or false"),
    ],
)
def test_mistakes_are_named_when_the_arguments_are_made(policy, options, message, tmp_path):
    with pytest.raises(PolicyError, match=message):
        arguments(tmp_path, RecomputeTrainingArguments, recompute_policy=policy, recompute_kwargs=options)


YAML = """
output_dir: out
use_cpu: true
recompute_policy:
  name: layers
  rules:
    - match: model.layers.*
      action: checkpoint
recompute_kwargs:
  kernels: false
  logits: false
"""


def test_from_yaml_json_and_the_command_line(tmp_path):
    parser = HfArgumentParser(RecomputeTrainingArguments)
    options = {"kernels": False, "logits": False}
    (tmp_path / "a.yaml").write_text(YAML)
    given = {"output_dir": "out", "use_cpu": True, "recompute_policy": LAYERS, "recompute_kwargs": options}
    (tmp_path / "a.json").write_text(json.dumps(given))
    line = ["--output_dir", "out", "--use_cpu", "--recompute_policy", "auto", "--recompute_kwargs", json.dumps(options)]
    for (found,), policy in (
        (parser.parse_yaml_file(str(tmp_path / "a.yaml")), LAYERS),
        (parser.parse_json_file(str(tmp_path / "a.json")), LAYERS),
        (parser.parse_args_into_dataclasses(line), "auto"),
        (parser.parse_args_into_dataclasses([*line, "--recompute_policy", json.dumps(LAYERS)]), LAYERS),
    ):
        assert found.recompute_policy == policy
        assert found.recompute_kwargs == options
        assert found.report_to[0] == "recompute"
        assert found.ddp_find_unused_parameters is False
        fields = ("output_dir", "recompute_policy", "recompute_kwargs", "report_to")
        written = json.dumps({"use_cpu": True, **{key: getattr(found, key) for key in fields}})
        again = RecomputeTrainingArguments(**json.loads(written))
        assert again.report_to == found.report_to
    assert parser.parse_args_into_dataclasses(line[:3])[0].report_to == []


def test_arguments_work_as_copies_and_from_a_file(tmp_path, monkeypatch):
    made = arguments(tmp_path, RecomputeTrainingArguments, recompute_policy="elementwise")
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        monkeypatch.delitem(integration.integration_utils.INTEGRATION_TO_CALLBACK, "recompute", raising=False)
        copied.__setstate__(vars(copied))  # as in a process that has made none
        trainer = MeasuredTrainer(model(), copied)
        trainer.train()
        assert len(logged(trainer, "recompute_dropped_nbytes")) == STEPS


def files(folder, *, but=()):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in but}


@pytest.mark.slow
def test_checkpoints_are_the_same_files_and_training_goes_on_from_either(tmp_path):
    def run(resume, *callbacks):
        """Always in one folder, whose name is in the files."""
        out = tmp_path / "out"
        if out.exists():
            out.rename(tmp_path / f"out-{len(list(tmp_path.iterdir()))}")
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
        llama = model(attention_dropout=0.1)
        trainer = MeasuredTrainer(llama, arguments(out, **options), callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        kept = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        return out.rename(kept)

    plain = run(None)
    policed = run(None, RecomputeCallback("elementwise", logs=False))
    half = [tmp_path / f"half-{index}" for index in range(2)]
    for source, copied in zip((plain, policed), half, strict=True):
        (source / "checkpoint-2").rename(copied)
    assert files(half[0]) == files(half[1])
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files(half[0]).keys()
    expected = files(plain / "checkpoint-4")
    assert expected == files(policed / "checkpoint-4")
    for start, callbacks in ((half[0], [RecomputeCallback("elementwise", logs=False)]), (half[1], [])):
        assert files(run(start, *callbacks) / "checkpoint-4") == expected
    logs = run(half[0], RecomputeCallback("elementwise"))
    assert files(logs / "checkpoint-4", but=("trainer_state.json",)).items() <= expected.items()


class Saves(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, model=None, **_):
        model.save_pretrained(self.folder)


def test_what_is_saved_under_a_policy_loads_without_this_package(tmp_path):
    trainer = trained(tmp_path, RecomputeCallback("auto", logits=False), Saves(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in trainer.model.state_dict().items())
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def lora(vocabulary=VOCABULARY, **options):
    peft = pytest.importorskip("peft")
    llama = model(vocabulary)
    torch.manual_seed(1)
    return peft.get_peft_model(llama, peft.LoraConfig(r=4, init_lora_weights=False, **options))


@each_dtype
def test_adapters_train_as_without_under_the_paths_of_the_model(precision, tmp_path):
    plain = trained(tmp_path, of=lora(), **precision)
    found = trained(tmp_path, RecomputeCallback(LAYERS), of=lora(), **precision)
    assert max(found.held) < 0.7 * min(plain.held)
    assert logged(found, "loss") == logged(plain, "loss")
    trainer_testing.assert_same_weights(found, plain)
    found.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ["q_proj", "lm_head"]])
def test_adapters_train_without_logits_also_where_the_head_has_one(targets, tmp_path):
    def adapted():
        return lora(vocabulary=MANY, target_modules=targets)

    plain = trained(tmp_path, RecomputeCallback("elementwise"), of=adapted())
    found = trained(tmp_path, RecomputeCallback("elementwise", logits=False), of=adapted())
    assert max(found.peaks) < 0.5 * min(plain.peaks)
    assert logged(found, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert len(logged(found, "token_accuracy")) == STEPS


# A loss without logits: what it saves, what is logged of it, and where logits are there all the same


HEAD = {"name": "head", "rules": [{"match": "lm_head", "action": "recompute", "via": "kernel"}]}


@pytest.mark.parametrize("policy", ["auto", *slow("elementwise", "none")])
def test_the_peak_falls(policy, tmp_path):
    plain = trained(tmp_path, RecomputeCallback(policy), of=model(MANY))
    options = {"recompute_policy": policy, "recompute_kwargs": {"logits": False}}
    found = trained(tmp_path, of=model(MANY), kind=RecomputeTrainingArguments, **options)
    whole = trainer_testing.BATCH * LENGTH * MANY * 4
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
