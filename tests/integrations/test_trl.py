"""TRL's trainers under ``logits=False``: what they write on logits is computed without them, with adapters too."""

import importlib
import os
import sys
from functools import partial
from types import SimpleNamespace

import models
import pytest
import torch
import transformers
from tiny import WideTensors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainer_testing import assert_same_weights, logged

from recompute.errors import UnsupportedError
from recompute.integrations.transformers import RecomputeCallback, _keep_lazy_in_trl
from recompute.substitution.lazy_logits import LazyLogits

VOCABULARY = 1031
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(VOCABULARY - 4))]
PAIRS = [{"prompt": f"w{n} w5", "chosen": f" w{n + 9} w7 w8", "rejected": f" w{n + 20} w9"} for n in range(8)]
ROWS = {
    "ORPO": PAIRS,
    "CPO": PAIRS,
    "DPO": PAIRS,
    "SFT": [{"text": f"w{n} w5 w6 w7 w8"} for n in range(8)],
    "KTO": [{"prompt": f"w{n} w5", "completion": f" w{n + 9} w7", "label": bool(n % 2)} for n in range(8)],
    "GRPO": [{"prompt": f"w{n} w5"} for n in range(8)],
    "RLOO": [{"prompt": f"w{n} w5"} for n in range(8)],
}
SAMPLES = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}


def is_weight(shape):
    """Whether it is a head's or an adapter's, turned around."""
    return len(shape) == 2 and shape[0] in (models.HIDDEN, 4)


make_model = partial(models.make, "llama", vocab_size=VOCABULARY)


def make_tokenizer():
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def trained(name, directory, callbacks, adapts=False, checkpoints=False):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    if name in ("ORPO", "CPO"):
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        trl = importlib.import_module(f"trl.experimental.{name.lower()}")
    options = SAMPLES if name in ("GRPO", "RLOO") else {}
    arguments = getattr(trl, f"{name}Config")(
        str(directory),
        **{"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "use_cpu": True},
        **{"bf16": False, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": checkpoints},
        **options,
    )
    given = {}
    if name in ("GRPO", "RLOO"):
        given["reward_funcs"] = [lambda completions, **_: [float(len({*each})) for each in completions]]
    if adapts:
        peft = pytest.importorskip("peft")
        modules = ["q_proj", *(["lm_head"] if name in ("ORPO", "CPO") else [])]  # TRL's fused head takes no adapter
        given["peft_config"] = peft.LoraConfig(r=4, target_modules=modules)
    elif name in ("DPO", "KTO"):
        given["ref_model"] = make_model()
    dataset, tokenizer = datasets.Dataset.from_list(ROWS[name]), make_tokenizer()
    kind = getattr(trl, f"{name}Trainer")
    model = make_model()
    torch.manual_seed(1)
    given |= {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": callbacks}
    trainer = kind(model, args=arguments, **given)
    step, seen = trainer.training_step, WideTensors(VOCABULARY)

    def watched(*args, **kwargs):
        with seen:
            return step(*args, **kwargs)

    trainer.training_step = watched
    trainer.train()
    return trainer, [shape[:-1].numel() for _, shape in seen.found if not is_weight(shape)]


@pytest.mark.slow
@pytest.mark.filterwarnings("error::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("adapts", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize("name", ROWS)
def test_no_trainer_makes_logits(name, adapts, tmp_path):
    plain, whole = trained(name, tmp_path, [], adapts)
    found, rows = trained(name, tmp_path, [RecomputeCallback("elementwise", logits=False)], adapts)
    if name in ("ORPO", "CPO"):  # the others have TRL's own fused head, which makes blocks of logits
        assert len(whole) > 8
        assert len(rows) <= 8, "one block of each loss and of its gradient"
    for key in ("loss", "grad_norm"):
        assert logged(found, key) == pytest.approx(logged(plain, key), rel=1e-4)


def test_gradients_by_hooks_are_bit_for_bit_those_without_and_trls_checkpoints_are_refused(tmp_path):
    (plain, _), (found, _) = (trained("SFT", tmp_path, given) for given in ([], [RecomputeCallback("elementwise")]))
    for key in ("loss", "grad_norm", "mean_token_accuracy"):
        assert logged(found, key) == logged(plain, key) != []
    assert min(logged(found, "recompute_dropped_nbytes")) > 0
    assert_same_weights(found, plain)
    with pytest.raises(UnsupportedError, match="TRL turns it on by default"):
        trained("SFT", tmp_path, [RecomputeCallback()], checkpoints=True)


def test_what_has_a_kernel_of_trls_is_written_out_where_logits_are_lazy(monkeypatch):
    asked = []
    utils = SimpleNamespace(_supports_trl_loss_kernel=lambda logits, index=None: bool(asked.append(logits)) or True)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    before, end = utils._supports_trl_loss_kernel, _keep_lazy_in_trl()
    logits = LazyLogits.of(torch.randn(2, 4), torch.randn(8, 4))
    assert not utils._supports_trl_loss_kernel(logits)
    assert asked == []
    logits + 0
    assert utils._supports_trl_loss_kernel(logits, index=None)
    end()
    assert utils._supports_trl_loss_kernel is before
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", SimpleNamespace())
    _keep_lazy_in_trl()()
