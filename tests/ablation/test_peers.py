"""What other libraries offer: each peer trains, says what it lacks, and leaves the libraries as they were."""

import sys
import types
from functools import partial

import pytest
import torch
from ablation_testing import TINY, by_policy, matching, run
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from recompute.ablation.ablation_config import HuggingFaceFields
from recompute.ablation.peers import under
from recompute.errors import AblationError

REGIONS = [f"region {number}" for number in range(8)]  # q, k, v, attention, o, gate, up, down


class Remat(types.SimpleNamespace):
    """Stands for the package: it notes the regions, and runs all of them again."""

    def __init__(self):
        self.names = []

    def checkpoint(self):
        return lambda function: partial(checkpoint, function, use_reentrant=False)

    def region(self, function, name, *, recompute):
        assert not recompute
        self.names.append(name)
        return function

    def recompute_needs_tensor(self, output):
        assert output.requires_grad


@pytest.mark.parametrize("is_installed", [False, True])
def test_torch_remat_saves_linears_and_attention_or_nothing(is_installed, tmp_path, monkeypatch):
    stand_in = Remat()
    if is_installed:
        pytest.importorskip("torch_remat")
    else:
        monkeypatch.setitem(sys.modules, "torch_remat", stand_in)
    attention = F.scaled_dot_product_attention
    none, saving, full = matching(run(tmp_path, peers=("torch-remat", "torch-remat-full"))).values()
    for row in (saving, full):
        assert row.losses == none.losses
        assert row.exact
        assert row.peak_bytes < none.peak_bytes
    assert F.scaled_dot_product_attention is attention
    if is_installed:
        assert full.activation_bytes_held < saving.activation_bytes_held
    else:
        assert stand_in.names[:16] == 2 * REGIONS, "each run of a layer begins anew"
        assert {*stand_in.names} == {*REGIONS}


class CutCrossEntropy:
    """Stands for the package: its function in release 25.1, in plain PyTorch."""

    @staticmethod
    def linear_cross_entropy(hidden, weight, targets, *, softcap, shift):
        assert softcap is None
        logits = F.linear(hidden[:, :-shift], weight)
        return F.cross_entropy(logits.flatten(0, 1), targets[:, shift:].flatten())


def test_cut_cross_entropy_takes_the_decoders_output(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", CutCrossEntropy)
    gpt2 = HuggingFaceFields(model_type="gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=300, n_positions=8)
    models = {"tiny": TINY.model, "gpt2": gpt2, "own": "its_own_model:make"}
    found = run(own / "out", models=models, peers=("cut-cross-entropy",), sequence_lengths=(8,), batch_size=1)
    rows = {(row.model, row.policy): row for row in found}
    for model in ("tiny", "gpt2"):
        peer = rows[model, "cut-cross-entropy"]
        assert peer.error is None
        assert peer.exact is False
        assert peer.losses == pytest.approx(rows[model, "none"].losses, rel=1e-5)
        assert peer.grad_error < 1e-5
    assert "needs a model of transformers with a decoder" in rows["own", "cut-cross-entropy"].error


@pytest.mark.parametrize(
    ("peer", "module", "packages"),
    [
        ("cut-cross-entropy", "cut_cross_entropy", "cut-cross-entropy"),
        ("torchtune-offload", "torchtune", "torchtune torchao"),
        ("torch-remat", "torch_remat", "torch-remat"),
        ("torch-remat-full", "torch_remat", "torch-remat"),
        ("liger", "liger_kernel", "liger-kernel"),
    ],
)
def test_a_peer_that_is_not_installed_is_a_row_that_says_what_to_install(peer, module, packages, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    _, row = run(tmp_path, peers=(peer,), steps=1)
    needed = f"the peer {peer} needs the package {packages.split()[0]}. Run pip install {packages}"
    assert row.error == f"AblationError: {needed}"


@pytest.fixture
def liger(monkeypatch):
    """What stands for the package is given; it rotates in a way of its own."""
    given = {}

    def apply_liger_kernel_to_llama(**options):
        given.update(options)
        modeling_llama.apply_rotary_pos_emb = lambda q, k, *_: (q * 2, k)

    library = types.ModuleType("liger_kernel.transformers")
    vars(library)["apply_liger_kernel_to_llama"] = apply_liger_kernel_to_llama
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return given


@pytest.mark.parametrize(("peer", "has_loss", "is_adapted"), [("liger", False, True), ("liger-loss", True, False)])
def test_liger_patches_the_model_itself_and_brings_its_loss_where_that_is_asked_for(peer, has_loss, is_adapted, liger):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=8))
    with under(peer, get_peft_model(model, LoraConfig(target_modules="all-linear")) if is_adapted else model):
        pass
    assert liger == {"cross_entropy": False, "fused_linear_cross_entropy": has_loss, "model": model}


def test_what_a_peer_replaces_is_put_back(liger, tmp_path):
    rows = by_policy(run(tmp_path, peers=("liger", "torch-checkpoint")))
    assert rows["liger"].losses_match is False
    assert rows["torch-checkpoint"].losses_match


def test_torchtune_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("torchtune", "torchtune.training"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with (
        pytest.raises(AblationError, match="torchtune-offload needs a CUDA device"),
        under("torchtune-offload", nn.Linear(2, 2)),
    ):
        pass
