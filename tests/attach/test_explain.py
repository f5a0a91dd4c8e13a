"""``explain`` after a forward: every tensor that autograd saved, what becomes of it, why, and the totals."""

import re
from typing import NamedTuple

import pytest
import torch
from engine_testing import function_of, its_result, module_of
from tiers import slow
from tiny import BATCH, HIDDEN, INTERMEDIATE, LENGTH, TOKENS, decoder, next_token_loss, rule, rules, token_ids
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.units import humanize

SHAPE = f"{BATCH}x{LENGTH}x{HIDDEN}"
NBYTES = TOKENS * HIDDEN * 4
HEADERS = ["made by", "saved by", "shape", "dtype", "bytes", "fate", "because"]


class Line(NamedTuple):
    made_by: str
    saved_by: str
    shape: str
    dtype: str
    nbytes: int
    fate: str
    reason: str


def tables(text):
    """The tables of tensors in what ``explain`` prints, by their titles."""
    found = {}
    for part in text.split("\n\n")[1:]:
        if "run as captured code" in part:
            continue
        title, header, dashes, *lines = part.splitlines()
        edges = [slice(*match.span()) for match in re.finditer("-+", dashes)]
        assert [header[edge].strip() for edge in edges] == HEADERS
        assert title not in found
        cells = [[line[edge].strip() for edge in edges] for line in lines]
        found[title] = [Line(*cell[:4], int(cell[4].replace(",", "")), *cell[5:]) for cell in cells]
    return found


def explained(forward, action="recompute", **options):
    """The tensors of a module that runs ``forward(linear, x)`` under a rule with ``options``."""

    module = module_of(lambda self, x: forward(self.linear, x), linear=nn.Linear(HIDDEN, HIDDEN, bias=False))
    handle = recompute.apply(module, rules(rule("Body", action, **options)))
    for _ in range(2):  # the first may have followed the plan of another region for a while
        module(torch.rand(BATCH, LENGTH, HIDDEN, requires_grad=True)).sum().backward()
    (lines,) = tables(handle.explain(wide=True)).values()
    return lines


def trained(policy, layers=2, steps=1):
    """A decoder after steps under a policy, and its handle."""
    model = decoder(layers=layers)
    handle = recompute.apply(model, policy)
    for _ in range(steps):
        next_token_loss(model, token_ids()).backward()
    return model, handle


def line_of(made_by, lines):
    (line,) = (line for line in lines if line.made_by == made_by)
    return line


def chain(linear, x):
    """Autograd saves what the product, sin and cos are given, and what exp returns."""
    return linear(x).sin().cos().exp()


def test_a_line_tells_who_made_a_tensor_who_saved_it_what_it_is_and_what_becomes_of_it():
    lines = explained(chain)
    weight, flat = f"{HIDDEN}x{HIDDEN}", f"{TOKENS}x{HIDDEN}"
    assert {line[:6] for line in lines} == {
        ("(given)", "aten.mm", weight, "float32", HIDDEN * HIDDEN * 4, "alive"),
        ("(given)", "aten.mm", flat, "float32", NBYTES, "kept"),
        ("aten.mm", "aten.sin", flat, "float32", NBYTES, "kept"),
        ("aten.sin", "aten.cos", SHAPE, "float32", NBYTES, "dropped"),
        ("aten.exp", "aten.exp", SHAPE, "float32", NBYTES, "dropped"),
    }
    assert [line.reason for line in lines if line.fate == "dropped"] == ["", ""]
    assert [line.reason for line in lines if line.fate == "alive"] == ["lives anyway"]


OUTSIDE = torch.rand(HIDDEN)


InTheDark = function_of(lambda x: x.exp(), lambda gradient, y: gradient * y, saves=its_result, name="InTheDark")


def attention(linear, x):
    q = linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).sin()


def overwritten(linear, x):
    y = linear(x)
    copied = y.clone()
    copied.cos()  # whose backward autograd would refuse
    copied.mul_(2.0)
    return y


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
REASONS = {
    "a GEMM": (chain, {}, "aten.mm", "gemm: the rule does not rerun it"),
    "a GEMM that the rule keeps": (chain, {"keep": "gemm"}, "aten.mm", "the rule's keep lists gemm"),
    "an op that the rule keeps": (chain, {"keep": "aten.sin"}, "aten.sin", "the rule's keep lists aten.sin"),
    "passed to keep": (
        lambda linear, x: recompute.keep(linear(x).exp().sin()).cos(), {}, "aten.sin", "passed to recompute.keep",
    ),
    "passed to keep by a name that the rule lists": (
        lambda linear, x: recompute.keep(linear(x).exp().sin(), "angle").cos(), {"keep": "angle"}, "aten.sin",
        "passed to recompute.keep",
    ),
    "made in a custom Function": (
        lambda linear, x: InTheDark.apply(linear(x)).sin(), {}, "InTheDark",
        "made inside of a custom autograd.Function",
    ),
    "made by a factory": (
        lambda linear, x: linear(x) * torch.full((HIDDEN,), 0.5), {}, "aten.full",
        "made by a factory op, so other code may have filled its memory",
    ),
    "overwritten": (overwritten, {}, "aten.clone", "overwritten after it was saved"),
    "handed out": (
        lambda linear, x: (y := linear(x).detach().exp(), y.numpy(), x * y)[2], {}, "handed out",
        "its memory was exposed, as an array or an address, and may change unnoticed",
    ),
    "a GEMM that is worth its bytes": (
        chain, {"rerun": "gemm", "price": 1e18}, "aten.mm", "cheaper to hold than to recompute",
    ),
    "a GEMM that fits": (
        chain, {"rerun": "gemm", "hold": "1GiB"}, "aten.mm", "cheaper to hold than to recompute",
    ),
    "little that takes long to bring back": (
        lambda linear, x: (y := linear(x)).sin() + (y * 2).sum().sin(), {}, "aten.sum",
        "small, and recomputing it takes as long as moving 2.3 KiB",
    ),
    "as large as what it comes from": (
        lambda linear, x: linear(x).exp().sin(), {}, "aten.exp",
        "smaller than the tensors that recomputing it would need",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "options", "made_by", "reason"), REASONS.values(), ids=REASONS)
def test_what_is_kept_says_why(forward, options, made_by, reason):
    line = line_of(made_by, explained(forward, via="hook", **options))
    assert line.fate == "kept"
    assert line.reason.split("; ")[0] == reason


def test_what_a_thin_gemm_brings_back_says_so():
    def forward(linear, x):
        q = linear(x)[..., :1]
        return (q @ q.transpose(1, 2)).softmax(-1).sin()

    lines = explained(forward, via="hook")
    assert line_of("aten._softmax", lines)[-2:] == ("dropped", "recomputing it reruns a thin (cheap) GEMM: aten.bmm")


def test_attention_is_kept_and_says_why():
    lines = [line for line in explained(attention) if line.made_by == ATTENTION]
    assert [line.shape for line in lines] == [f"{BATCH}x2x{LENGTH}x{HIDDEN // 2}", f"{BATCH}x2x{LENGTH}"]
    assert {(line.fate, line.reason.split("; ")[0]) for line in lines} == {
        ("kept", "attention: the rule does not rerun it")
    }


def test_what_was_made_outside_is_kept_and_says_so():
    given, outside = (line for line in explained(lambda linear, x: linear(x) * OUTSIDE) if line.fate == "kept")
    assert (given.shape, outside.shape) == (f"{TOKENS}x{HIDDEN}", str(HIDDEN))
    assert (given.saved_by, outside.saved_by) == ("aten.mm", "aten.mul")
    assert given.reason == outside.reason == "an input of the module"


@pytest.mark.parametrize(
    ("action", "options", "fate_of_product"),
    [
        ("recompute", {"via": "hook"}, "kept"),
        ("recompute", {"keep": "other_name"}, "kept"),
        ("recompute", {"rerun": "gemm"}, "dropped"),
        ("checkpoint", {"keep": "other_name"}, "dropped"),
        ("checkpoint", {"keep": "aten.cos"}, "dropped"),
    ],
)
def test_what_the_rule_does_not_keep_is_dropped(action, options, fate_of_product):
    lines = explained(lambda linear, x: recompute.keep(linear(x).sin(), "a_name").cos(), action, **options)
    assert line_of("aten.sin", lines).fate == "dropped"
    assert line_of("aten.mm", lines).fate == fate_of_product


def test_what_is_held_for_others_alone_says_so():
    """A cast keeps nothing for its own backward; here what it returns is dropped, and what it was given held."""
    lines = explained(lambda linear, x: linear(x).double().sin())
    held, dropped = line_of("aten.mm", lines), line_of("aten._to_copy", lines)
    assert (held.saved_by, held.nbytes, held.fate) == ("-", NBYTES, "kept")
    assert "autograd alone would not save it" in held.reason
    assert re.search(r"1 rerun op reads it", held.reason)
    assert (dropped.saved_by, dropped.dtype, dropped.nbytes, dropped.fate) == (
        "aten.sin", "float64", 2 * NBYTES, "dropped",
    )  # fmt: skip


def test_before_any_forward_there_are_no_tensors_to_tell_of():
    model = decoder()
    handle = recompute.apply(model)
    assert tables(handle.explain(wide=True)) == {}
    with torch.no_grad():
        model(token_ids())
    assert tables(handle.explain(wide=True)) == {}


def test_modules_treated_alike_share_a_table_and_others_have_their_own():
    model, handle = trained("elementwise", layers=3)
    title, last = tables(handle.explain(wide=True))
    assert title.startswith("layers.* (TinyDecoderLayer), each of 3: ")
    assert last.startswith("norm (TinyRMSNorm): ")
    model.layers[1].self_attn.dropout = 0.5
    next_token_loss(model, token_ids()).backward()
    titles = [title.split(":")[0] for title in tables(handle.explain(wide=True))]
    layers = "layers.* (TinyDecoderLayer)"
    assert titles == [f"{layers}, each of 2", layers, "norm (TinyRMSNorm)"]


def test_a_number_in_a_name_is_part_of_the_name():
    """Only a whole part of a path is an index, so ``wav2vec2`` and ``conv1`` are told as they are called."""
    model = nn.ModuleDict({"wav2vec2": decoder(), "conv1": nn.Tanh(), "conv2": nn.Tanh()})
    text = recompute.apply(model, rules(rule("TinyDecoderLayer"), rule("Tanh"))).explain()
    told = [line.split()[0] for line in text.splitlines()]
    assert {"wav2vec2.layers.*", "conv1", "conv2"} <= set(told)


def test_a_checkpoint_without_exceptions_has_no_table():
    _, handle = trained(rules(rule("TinyMLP"), rule("TinyRMSNorm", "recompute", via="hook")))
    assert all("TinyRMSNorm" in title for title in tables(handle.explain(wide=True)))


def test_what_was_dropped_and_kept_adds_up_to_the_totals():
    model, handle = trained(rules(rule("TinyDecoderLayer", "recompute", via="hook")))
    ((title, lines),) = tables(handle.explain(wide=True)).items()
    stats = handle.stats()
    for fate, nbytes in (("dropped", stats.dropped_nbytes), ("kept", stats.kept_nbytes)):
        total = sum(line.nbytes for line in lines if line.fate == fate)
        assert total * len(model.layers) == nbytes
        assert f"{fate} {total:,} bytes ({total // TOKENS} a token, {TOKENS} tokens)" in title


def overwrites():
    """Saves what it then changes, so that autograd would refuse to run that backward."""
    return module_of(lambda self, x: overwritten(self.linear, x), linear=nn.Linear(HIDDEN, HIDDEN))


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(HIDDEN), overwrites])
def test_what_is_overwritten_is_kept_and_counted_but_for_running_statistics_which_live_anyway(make):
    module = make()
    handle = recompute.apply(module, rules(rule(type(module).__name__, "recompute", via="hook")))
    module(torch.randn(TOKENS, HIDDEN)).sum().backward()
    stats = handle.stats()
    assert stats.eager_nbytes == stats.kept_nbytes + stats.dropped_nbytes
    ((_, lines),) = tables(handle.explain(wide=True)).items()
    assert sum(line.nbytes for line in lines if line.fate == "kept") == stats.kept_nbytes
    running = [line.fate for line in lines if line.made_by == "(given)" and line.shape == str(HIDDEN)]
    assert set(running) <= {"alive"}


def summary(text):
    """The cells of the first table of ``explain``, by module."""
    lines = text.split("\n\n")[0].splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("---"))
    edges = [slice(*match.span()) for match in re.finditer("-+", lines[at])]
    headers = [lines[at - 1][edge].strip() for edge in edges]
    rows = [[line[edge].strip() for edge in edges] for line in lines[at + 1 : -1]]
    return {row[0]: dict(zip(headers, row, strict=True)) for row in rows}


def test_a_row_says_which_modules_got_which_rule_and_how_these_come_back():
    given = [
        {"match": "layers.0", "action": "checkpoint"},
        {"match": "layers.*.self_attn", "action": "keep"},
        {"type": "TinyRMSNorm", "action": "recompute", "via": "hook"},
        {"type": "TinyMLP", "action": "recompute", "via": "kernel"},
    ]
    _, handle = trained({"name": "mixed", "rules": given})
    assert handle.explain(wide=True).startswith("policy mixed")
    rows = {name: row for name, row in summary(handle.explain(wide=True)).items() if "rules" in row["rule"]}
    assert {name: (row["count"], row["rule"][6], row["in backward"]) for name, row in rows.items()} == {
        "layers.*": ("1", "0", "its Python runs again from its inputs"),
        "layers.*.self_attn": ("2", "1", "everything is kept"),
        **{f"layers.*.{name}_layernorm": ("2", "2", "cheap ops run again") for name in ("input", "post_attention")},
        "norm": ("1", "2", "cheap ops run again"),
        "layers.*.mlp": ("2", "3", "kernel: gated_mlp (silu)"),
    }
    root, hidden = TOKENS * 4, NBYTES
    assert number(rows["norm"]["dropped a forward"]) == root + 2 * hidden
    assert number(rows["norm"]["kept a forward"]) == hidden


def number(cell):
    return int(cell.replace(",", "") or 0)


@pytest.mark.parametrize("policy", ["elementwise", "hook", "kernel", "full", "alternate"])
@pytest.mark.parametrize("steps", [*slow(1), 3])
def test_the_last_row_is_stats_and_rows_add_up_to_it(policy, steps):
    _, handle = trained(policy, layers=3, steps=steps)
    rows = summary(handle.explain(wide=True))
    total, stats = rows.pop("total"), handle.stats()
    assert number(total["forwards"]) == stats.frames
    for what, nbytes in (("eager", stats.eager_nbytes), ("dropped", stats.dropped_nbytes), ("kept", stats.kept_nbytes)):
        assert number(total[f"{what} in all"]) == nbytes == sum(number(row[f"{what} in all"]) for row in rows.values())
        for row in rows.values():
            assert number(row[f"{what} in all"]) == number(row["forwards"]) * number(row[f"{what} a forward"])
    assert stats.eager_nbytes > stats.kept_nbytes


@pytest.mark.parametrize("policy", ["elementwise", "hook", "kernel"])
def test_all_that_is_counted_as_dropped_is_listed(policy):
    """Also what another module saves of a module's output, as projections and the head do of a norm's."""
    _, handle = trained(policy, layers=3)
    listed = 0
    for title, lines in tables(handle.explain(wide=True)).items():
        modules = re.search(r", each of (\d+):", title)
        listed += (1 if modules is None else int(modules[1])) * sum(x.nbytes for x in lines if x.fate == "dropped")
    assert listed == handle.stats().dropped_nbytes
    (norm,) = (lines for title, lines in tables(handle.explain(wide=True)).items() if title.startswith("norm "))
    assert norm[-1][1:] == (
        "(outside)", SHAPE, "float32", NBYTES, "dropped", "an output that another module saved",
    )  # fmt: skip


def test_what_is_saved_outside_is_told_of_the_last_forward_alone():
    model, handle = trained("hook", steps=2)
    (norm,) = (lines for title, lines in tables(handle.explain(wide=True)).items() if title.startswith("norm "))
    assert [line.saved_by for line in norm].count("(outside)") == 1
    model.lm_head.weight.requires_grad_(False)  # whose gradient alone wants the norm's output
    next_token_loss(model, token_ids()).backward()
    (norm,) = (lines for title, lines in tables(handle.explain(wide=True)).items() if title.startswith("norm "))
    assert [line.saved_by for line in norm].count("(outside)") == 0


def test_totals_of_an_mlp_are_told_a_token_wherever_its_input_comes_from():
    _, handle = trained("hook")  # under which a norm gives the input back
    (title,) = (title for title in tables(handle.explain(wide=True)) if "TinyMLP" in title)
    each = 2 * INTERMEDIATE * 4
    assert f"dropped {each * TOKENS:,} bytes ({each} a token, {TOKENS} tokens)" in title
    assert f"kept {each * TOKENS:,} bytes ({each} a token, {TOKENS} tokens)" in title


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("policy", ["elementwise", "kernel", "full"])
def test_by_default_lines_fit_and_say_bytes_as_people_do(policy, width):
    """A name that has no room loses its middle. The wide text has all of it."""
    model = nn.ModuleDict({"a_long_name_" * 3: decoder(layers=2)})
    (inner,) = model.values()
    handle = recompute.apply(model, policy)
    next_token_loss(inner, token_ids()).backward()
    text, stats = handle.explain(width=width), handle.stats()
    assert max(map(len, text.splitlines())) <= width
    total = next(line.split() for line in text.splitlines() if line.startswith("total "))
    sizes = [humanize(nbytes) for nbytes in (stats.eager_nbytes, stats.dropped_nbytes, stats.kept_nbytes)]
    assert total[2:] == [str(stats.frames), *" ".join(sizes).split()]
    assert width > 80 or "…" in text
    assert "a_long_name_" * 3 in handle.explain(wide=True)


@pytest.mark.parametrize("policy", ["elementwise", "kernel"])
def test_both_widths_tell_of_the_same_modules_and_tensors_in_the_same_order(policy):
    _, handle = trained(policy)
    wide, text = handle.explain(wide=True), handle.explain(width=1000)
    lines = [line for each in tables(wide).values() for line in each]
    told = [line.split() for line in text.splitlines() if re.search("[^,]B  (dropped|kept|alive)$", line)]
    assert [(*line[:2], line.fate) for line in lines] == [(*words[:2], words[-1]) for words in told]
    assert [" ".join(words[-3:-1]) for words in told] == [humanize(line.nbytes) for line in lines]
    reasons = [line.reason for line in lines if line.reason and line.fate != "alive"]
    assert [line.strip() for line in text.splitlines() if line.strip() in reasons] == reasons
    for row in summary(wide).values():
        if row["class"]:
            told_rule = f"    {row['class']}, {row['rule']}; {row['in backward']}".replace(", -; ", "; ")
            assert told_rule in text.splitlines()
