"""Lightning's Trainer under a policy: memory and values, what is logged, what is left behind, what is refused."""

import copy
import importlib
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from lightning_testing import Decoder, assert_same_training, batches, fitted, lightning
from tiers import by_default
from tiny import classes
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trainer_testing import ACCUMULATED, MANY, STEPS, model

from recompute.errors import PolicyError, PolicyWarning, UnsupportedError
from recompute.integrations.lightning import RecomputeCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

LAYERS = {"rules": [{"match": "**.layers.*", "action": "checkpoint"}]}
OF_MODEL = {"rules": [{"match": "model.layers.*", "action": "checkpoint"}]}


@pytest.mark.parametrize("precision", by_default(["32-true", "bf16-mixed"], "bf16-mixed"))
def test_memory_falls_and_not_a_bit_changes(precision, tmp_path):
    plain = fitted(tmp_path, precision=precision)
    for callback in (RecomputeCallback(), RecomputeCallback(LAYERS), RecomputeCallback(OF_MODEL, module="model")):
        found = fitted(tmp_path, callback, precision=precision)
        assert len(found.held) == len(plain.held) == STEPS * ACCUMULATED
        assert max(found.held) < 0.8 * min(plain.held)
        assert_same_training(found, plain)
        assert found.records.of("loss") == plain.records.of("loss")


def test_a_training_step_that_calls_the_model_drops_what_the_model_does(tmp_path):
    """Norms' outputs are saved outside of what `hook` governs: something around both has to look for them."""
    found = [fitted(tmp_path, RecomputeCallback("hook", module=module)) for module in (None, "model")]
    assert found[0].held == found[1].held


class Manual(Decoder):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("policy", ["elementwise", "full"])
def test_manual_optimization(policy, tmp_path):
    plain = fitted(tmp_path, of=Manual(), accumulate_grad_batches=1)
    found = fitted(tmp_path, RecomputeCallback(policy), of=Manual(), accumulate_grad_batches=1)
    assert max(found.held) < 0.8 * min(plain.held)
    assert_same_training(found, plain)
    assert len(found.records.of("recompute_dropped_nbytes")) == STEPS


@pytest.mark.slow
def test_a_compiled_module_obeys_it_too(tmp_path):
    def run(*callbacks):
        module = Compiled()
        lightning(tmp_path, *callbacks).fit(torch.compile(module, backend="aot_eager"), batches())
        return module

    plain, found = run(), run(RecomputeCallback("full"))
    assert found.saved[-1] < 0.7 * plain.saved[-1]
    assert found.losses == plain.losses
    with pytest.raises(UnsupportedError, match="logits=False: the LightningModule is compiled with its loss"):
        run(RecomputeCallback(logits=False))


class Compiled(Decoder):
    """Of each training step: the bytes of what autograd saves."""

    def __init__(self):
        super().__init__()
        self.saved = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        return self.note(loss)

    @torch.compiler.disable
    def note(self, loss):
        pending, sizes = [loss.grad_fn], {}
        while pending:
            node = pending.pop()
            for tensor in getattr(node, "saved_tensors", ()):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            pending += [each for each, _ in node.next_functions if each is not None]
        self.saved.append(sum(sizes.values()))
        self.losses.append(loss.item())
        return loss


def test_the_logs_come_when_the_trainer_logs(tmp_path):
    found = fitted(tmp_path, RecomputeCallback(), max_steps=4, log_every_n_steps=2, accumulate_grad_batches=1)
    assert len(found.records.of("loss")) == len(found.records.of("recompute_dropped_nbytes")) == 2
    fitted(tmp_path, RecomputeCallback(), barebones=True, default_root_dir=None, logger=None, log_every_n_steps=None)


@pytest.mark.gpu
def test_peak_and_held_memory_fall_on_cuda_and_are_logged(tmp_path):
    found = []
    for callback in (RecomputeCallback("none"), RecomputeCallback("auto"), RecomputeCallback("auto", logits=False)):
        options = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed"}
        records = fitted(tmp_path, callback, of=Decoder(model(MANY)), **options).records
        found.append([records.of(key)[-1] for key in ("recompute_held_nbytes", "recompute_peak_nbytes")])
    none, auto, without = found
    for policed in (auto, without):
        assert policed[0] < none[0]
        assert policed[1] < none[1]


def test_without_logits_the_peak_falls_and_a_loss_that_has_them_is_told_of(tmp_path):
    plain = fitted(tmp_path, RecomputeCallback("none"), of=Decoder(model(MANY)))
    found = fitted(tmp_path, RecomputeCallback("none", logits=False), of=Decoder(model(MANY)))
    assert max(found.peaks) < 0.7 * min(plain.peaks)
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)

    class Other(Decoder):
        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch["input_ids"]).logits.tanh().mean()

    with pytest.warns(
        PolicyWarning, match=r"logits=False has no effect.*training_step.*or drop logits=False"
    ) as caught:
        fitted(tmp_path, RecomputeCallback(logits=False), of=Other())
    assert len([each for each in caught if each.category is PolicyWarning]) == 1


class Notes(Callback):
    """Whether the policy was on, in each part of a Trainer's life."""

    def __init__(self, callback):
        self.of, self.found = callback, dict[str, bool]()

    def _note(self, *given, name):
        self.found[name] = self.of.handle is not None

    def __getattribute__(self, name):
        if name.startswith("on_") and name.endswith("_start"):
            return lambda *given: self._note(*given, name=name)
        return super().__getattribute__(name)


def states(module):
    return classes(module) | {"replaced": [name for name in ("forward", "training_step") if name in vars(module)]}


def test_it_is_on_while_fit_runs_and_never_else(tmp_path):
    callback = RecomputeCallback("auto", logits=False)
    notes, module = Notes(callback), Decoder()
    before = states(module)
    trainer = lightning(tmp_path, callback, notes, num_sanity_val_steps=1)
    trainer.fit(module, batches(), batches())
    assert states(module) == before
    assert {name: notes.found[name] for name in ("on_fit_start", "on_train_start", "on_validation_start")} == {
        "on_fit_start": True,
        "on_train_start": True,
        "on_validation_start": True,
    }
    notes.found.clear()
    trainer.validate(module, batches(), verbose=False)
    assert {*notes.found.values()} == {False}
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit(module, batches(4))
    assert notes.found["on_train_start"]
    assert len(module.losses) == 2 * STEPS * ACCUMULATED
    assert states(module) == before


@pytest.mark.parametrize(("kind", "raised"), [(ValueError, ValueError), (KeyboardInterrupt, SystemExit)])
def test_an_exception_takes_it_off(kind, raised, tmp_path):
    class Stop(Callback):
        def on_before_backward(self, *_):
            raise kind("enough")

    callback, module = RecomputeCallback(), Decoder()
    before = states(module)
    with pytest.raises(raised):
        lightning(tmp_path, callback, Stop()).fit(module, batches())
    assert callback.handle is None
    assert states(module) == before
    fitted(tmp_path, callback, of=module)
    assert states(module) == before


def test_copies_made_while_it_trains_are_without(tmp_path):
    class Copies(Callback):
        found: list[Any]

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.found = [copy.deepcopy(pl_module.model), pickle.loads(pickle.dumps(pl_module.model))]
            trained, pl_module._trainer = pl_module._trainer, None
            copied = copy.deepcopy(pl_module)
            pl_module._trainer = trained
            copied.log = lambda *_: None
            before = len(pl_module.losses)
            copied.training_step(next(iter(batches())), 0)
            assert len(pl_module.losses) == before
            assert len(copied.losses) == before + 1

    copies = Copies()
    fitted(tmp_path, RecomputeCallback(), copies)
    expected = classes(model())
    for copied in copies.found:
        assert classes(copied) == expected


def test_checkpoints_are_the_same_files_and_training_goes_on_from_either(tmp_path):
    def run(name, *callbacks, steps, resume=None):
        folder = tmp_path / name
        saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        torch.manual_seed(3)
        module = Decoder(model(attention_dropout=0.1))
        trainer = lightning(folder, *callbacks, saves, max_steps=steps, enable_checkpointing=True)
        trainer.fit(module, batches(4), ckpt_path=None if resume is None else str(resume))
        forwards[name] = len(module.losses)
        return folder

    forwards = {}

    def content(folder, step):
        found = torch.load(folder / f"step={step}.ckpt", weights_only=False)
        (saves,) = found["callbacks"].values()  # the callback of a policy has no state
        assert saves.pop("dirpath") == str(folder)
        paths = {key: value for key, value in saves.items() if "path" in key or key == "best_k_models"}
        found["callbacks"] = {key: value for key, value in saves.items() if key not in paths}
        return pickle.dumps(torch.utils._pytree.tree_map_only(Tensor, lambda each: each.tolist(), found))

    plain = run("plain", steps=4)
    policed = run("policed", RecomputeCallback(), steps=4)
    for step in (2, 4):
        assert content(policed, step) == content(plain, step)
    on = run("on", RecomputeCallback(), steps=4, resume=plain / "step=2.ckpt")
    off = run("off", steps=4, resume=policed / "step=2.ckpt")
    assert content(on, 4) == content(off, 4)
    assert forwards["policed"] == forwards["plain"] == 8
    assert forwards["on"] == forwards["off"]
    assert forwards["off"] in (3, 4)  # without a policy: Lightning 2.4 resumes with a forward less


def refusal(strategy):
    with pytest.raises(UnsupportedError) as caught:
        RecomputeCallback().setup(SimpleNamespace(strategy=strategy), Decoder(), "fit")
    return str(caught.value)


def test_strategies_that_would_fight_it_are_refused():
    """FSDP1 wants a GPU to be tried."""
    checkpointing = refusal(FSDPStrategy(activation_checkpointing_policy={nn.Linear}))
    assert "activation_checkpointing_policy of FSDPStrategy" in checkpointing
    assert "drop the RecomputeCallback" in checkpointing
    assert "Use ModelParallelStrategy and fully_shard" in refusal(FSDPStrategy())


def test_layers_in_a_checkpoint_wrapper_are_refused(tmp_path):
    module = Decoder()
    module.model.model.layers[0] = checkpoint_wrapper(module.model.model.layers[0])
    with pytest.raises(
        UnsupportedError, match=r"CheckpointWrapper in model.model.layers.0\).*Remove checkpoint_wrapper"
    ):
        fitted(tmp_path, RecomputeCallback(), of=module)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UnsupportedError, match=r"module='modle': .* of Decoder \(did you mean 'model'\?\)"):
        fitted(tmp_path, RecomputeCallback(module="modle"))
    with pytest.raises(PolicyError, match="did you mean 'elementwise'"):
        RecomputeCallback("elementwize")
    with pytest.raises(PolicyError, match="RecomputeCallback: kernels: expected true or false"):
        RecomputeCallback(kernels="yes")


def test_without_lightning_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "recompute.integrations.lightning")
    with pytest.raises(ModuleNotFoundError, match=r"needs Lightning.*pip install 'torch-recompute\[lightning\]'"):
        importlib.import_module("recompute.integrations.lightning")
