"""``recompute.ablate``: policies compared on a model of the caller's own, in Python and by the name of a factory."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from ablation_testing import matching
from test_cli import recompute as command
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.ablation.trials import Experiment
from recompute.errors import AblationError, ModelError, PolicyError

WIDTH, ROWS = 8, 512


class MLPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class MLP(nn.Module):
    """Returns what ``output`` makes of a tensor."""

    def __init__(self, output=lambda x: x):
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(2))
        self.output = output

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.SiLU()) for _ in range(2)
        )

    def forward(self, images, labels):
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return {"loss": F.cross_entropy(x.mean((-2, -1)), labels)}


def mlp():
    return MLP(), torch.randn(ROWS, WIDTH)


def cnn():
    return CNN()


def images():
    return {"images": torch.randn(2, 3, 6, 6), "labels": torch.randint(WIDTH, (2,))}


def ablate(*arguments, **options):
    return recompute.ablate(*arguments, **{"steps": 2, "warmup": 0, "device": "cpu", "peers": (), **options})


ALL_FILES = {"results.json", "results.md", "results.png", "memory.png", "times.png", "report.html"}
CHECKPOINT = {"name": "again", "rules": [{"match": ["blocks.*", "stages.*"], "action": "checkpoint"}]}


@pytest.mark.slow
def test_an_mlp_and_its_peers():
    state = torch.get_rng_state()
    found = ablate(mlp, policies=["none", "elementwise", CHECKPOINT], peers=["torch-checkpoint", "torch-selective"])
    assert torch.equal(torch.get_rng_state(), state)
    assert [*matching(found.rows)] == ["none", "elementwise", "again", "torch-checkpoint", "torch-selective"]
    none, *others = found.rows
    for row in others:  # dropout included: each row draws the same
        assert row.exact
        assert row.losses_match
        assert row.activation_bytes_held < none.activation_bytes_held
    first, second = none.losses
    again, other = (ablate(mlp, policies=[], seed=seed).rows[0].losses for seed in (0, 1))
    assert second != first
    assert again == none.losses != other, "a model that was trained is not seen again"


def test_a_cnn_with_a_batch_a_step_and_peers_on_its_stages():
    drawn = []

    def batch():
        drawn.append(images()["images"])
        return {**images(), "images": drawn[-1]}

    peers = ["torch-checkpoint"]
    found = ablate(cnn, batch, {"mine": CHECKPOINT}, peers=peers, layers="stages.*", steps=3, optimizer=torch.optim.SGD)
    assert [*matching(found.rows)] == ["none", "mine", "torch-checkpoint"]
    assert all(row.losses_match for row in found.rows)
    assert len(drawn) == 3
    assert not torch.equal(drawn[0], drawn[1])
    assert "CNN, " in found.markdown()
    assert "images 2x3x6x6" in found.markdown()


def test_what_is_returned_shows_and_saves_itself(tmp_path):
    steps = []
    seen = []
    found = ablate(
        mlp, policies=["elementwise"], out=tmp_path, progress=lambda *step: steps.append(step), on_row=seen.append
    )
    assert tuple(seen) == found.rows
    assert steps == [(name, step, 2) for name in ("none", "elementwise") for step in (1, 2)]
    assert found.row("elementwise") is found.rows[1]
    assert str(found) == found.table()
    assert [line.split()[0] for line in found.table().splitlines()[2:]] == ["none", "elementwise"]
    assert found.markdown().startswith("`elementwise` is fastest")
    assert found.plot().axes[0].get_xlabel() == "milliseconds a step"
    saved = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert saved["complete"]
    assert [row["policy"] for row in saved["rows"]] == ["none", "elementwise"]
    assert {path.name for path in tmp_path.iterdir()} == ALL_FILES


@pytest.mark.parametrize(
    "output",
    [
        lambda x: x.square().mean(), lambda x: x, lambda x: (x, x.sum(-1), "text"),
        lambda x: {"loss": x.mean(), "other": x}, lambda x: SimpleNamespace(loss=x.mean()),
    ],
    ids=["a scalar", "a tensor", "a tuple", "a key", "an attribute"],
)  # fmt: skip
def test_a_loss_is_found_in_what_a_model_returns(output):
    found = ablate(lambda: MLP(output), torch.randn(ROWS, WIDTH), [CHECKPOINT], steps=1)
    assert [row.error for row in found.rows] == [None, None]


def test_a_loss_of_the_callers_own_and_a_dtype():
    found = ablate(mlp, policies=["elementwise"], loss=lambda x: 3 * x.float().mean(), dtype=torch.bfloat16)
    assert matching(found.rows)
    assert "bfloat16" in found.results["config"]["model"]


def test_a_factory_that_gives_other_weights_each_time_is_told_so():
    generator = torch.Generator()
    generator.seed()

    def drifting():
        model, batch = mlp()
        nn.init.normal_(model.blocks[0].up.weight, generator=generator)
        return model, batch

    (row,) = ablate(drifting, policies=[]).rows
    assert "other weights when it was called again" in str(row.error)


X = torch.randn(ROWS, WIDTH)
WRONG = [
    (MLP(), {}, ModelError, "expected a function .* found MLP"),
    ("mlp", {}, ModelError, "found str"),
    (lambda width: MLP(), {}, ModelError, "a function without arguments .*; missing a required argument: 'width'"),
    (lambda: 3, {}, ModelError, r"expected it to return an nn.Module, or \(nn.Module, batch\); found int"),
    (cnn, {}, AblationError, r"a batch is missing. Pass one, or have cnn return \(model, batch\)"),
    (mlp, {"batch": X}, AblationError, "mlp returns a batch, and a batch is passed as well"),
    (cnn, {"batch": 3}, ModelError, "a tensor, a tuple of arguments or a mapping"),
    (lambda: (nn.Identity(), X), {}, ModelError, "parameters to train; Identity has none"),
    (mlp, {"policies": ["ful"]}, PolicyError, "did you mean 'full'"),
    (mlp, {"policies": "full"}, AblationError, r"expected a list, as in \['full'\]"),
    (mlp, {"policies": [CHECKPOINT, CHECKPOINT]}, AblationError, "that no other policy .* found 'again'"),
    (mlp, {"policies": {"torch-checkpoint": "full"}}, AblationError, "no peer has; found 'torch-checkpoint'"),
    (mlp, {"peers": ["torch-chekpoint"]}, AblationError, r"peers\[0\]: .*did you mean 'torch-checkpoint'"),
    (mlp, {"peers": "torch-checkpoint"}, AblationError, "peers: expected a list"),
    (mlp, {"steps": 0}, AblationError, "steps: expected .*greater than 0; found 0"),
    (mlp, {"warmup": -1}, AblationError, "warmup: expected .*greater than or equal to 0; found -1"),
    (mlp, {"dtype": "bfloat16"}, AblationError, "dtype: expected a torch.dtype of floats"),
    (mlp, {"device": "cuda"}, AblationError, "device is cuda"),
]


@pytest.mark.parametrize(("factory", "options", "kind", "message"), WRONG)
def test_what_cannot_be_is_refused_before_anything_is_trained(factory, options, kind, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Experiment, "row", lambda *_: pytest.fail("trained"))
    with pytest.raises(kind, match=message):
        ablate(factory, **options)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["explain", "elementwise", "--dtype", "float32"], r"\* +2 .*\n +Block, .* cheap ops run again"),
        (["explain", "elementwise"], "Sequential, 176 parameters, bfloat16 on cpu; 64x8"),
        (["verify", "elementwise"], "equal those without it, bit for bit"),
        (["estimate", "--policy", "elementwise"], "Sequential"),
        (["plan", "--budget", "1GiB"], "Block"),
        (["ablate", "--policy", "elementwise", "--steps", "1", "--out", "results"], "elementwise"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_take_the_name_of_a_factory(own, arguments, expected):
    device = [] if arguments[0] == "estimate" else ["--device", "cpu"]
    code, output = command(*arguments, "--model", "its_own_model:make", *device)
    assert code == 0, output
    assert re.search(expected, output)


def test_what_a_factorys_models_gave_is_resumed(own):
    asked = ["ablate", "--model", "its_own_model:make", "--policy", "full", "--device", "cpu", "--out", "results"]
    assert command(*asked, "--steps", "1")[0] == 0
    code, output = command(*asked, "--steps", "1", "--resume")
    assert (code, " done" in output) == (0, False), output  # nothing is trained
    code, output = command(*asked, "--steps", "2", "--resume")
    assert (code, "config.steps: results.json has 1, this run 2" in output) == (2, True)


VERIFY, ESTIMATE = ["verify", "elementwise", "--device", "cpu"], ["estimate"]


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        (VERIFY, "nowhere:make", "there is no module nowhere"),
        (VERIFY, "its_own_model:none", "its_own_model has no none"),
        (VERIFY, "its_own_model:number", "expected a function .* found int"),
        (VERIFY, "its_own_model:alone", r"expected it to return \(model, batch\)"),
        (VERIFY, "its_own_model:fails",
            r"it raised OSError: the disk is full \(\S+its_own_model\.py, line 19\)\. Call it"),
        (VERIFY, "its_own_model:other_keyword",
            r"for the forward of .*, forward\(input\); found the keywords y: missing .* 'input'"),
        (ESTIMATE, "its_own_model:nothing", "with parameters to train; found none"),
    ],
)  # fmt: skip
def test_what_is_no_factory_of_a_model_and_a_batch_is_told(own, arguments, name, message):
    code, output = command(*arguments, "--model", name)
    assert code == 2
    assert re.search(message, " ".join(output.split()))


def test_the_name_is_a_function_whichever_module_was_imported_first():
    assert callable(recompute.ablate)
    assert recompute.ablation is sys.modules["recompute.ablation"]
    with pytest.raises(AttributeError, match="no attribute 'ablat'"):
        recompute.ablat  # noqa: B018
