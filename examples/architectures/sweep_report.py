"""The report of a sweep: a summary, a row for each architecture that was compared, and why the others were not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tabulate import tabulate

from recompute.units import humanize

Row = dict[str, Any]
VERDICTS = {"bitwise": "bitwise", "close": "close", "idle": "nothing governed", "refused": "refused", "wrong": "wrong"}


def summary(record: dict[str, Any]) -> str:
    """How many architectures were tried and compared, and how each preset did."""
    rows: dict[str, Row] = record["rows"]
    compared = [row for row in rows.values() if "outcomes" in row]
    unlike = sum("differs without a policy" in row for row in rows.values())
    counts = []
    for preset in record["presets"]:
        outcomes = [row["outcomes"][preset] for row in compared if preset in row["outcomes"]]
        verdicts = Counter(outcome["verdict"] for outcome in outcomes)
        captured, regions = (sum(each.get(name, 0) for each in outcomes) for name in ("captured", "regions"))
        counts.append([preset, *(verdicts[verdict] for verdict in VERDICTS), f"{captured:,} of {regions:,}"])
    wrong = sum(line[-2] for line in counts)
    return (
        f"Of {len(rows)} architectures, {len(compared)} were compared, {unlike} compute other bits each time without a "
        f"policy, and {len(rows) - len(compared) - unlike} were not built. Wrong: {wrong}.\n\n"
        + tabulate(counts, ["preset", *VERDICTS.values(), "regions captured"], "github")
    )


def report(record: dict[str, Any]) -> str:
    """results.md."""
    rows: dict[str, Row] = record["rows"]
    presets = record["presets"]
    compared = {name: row for name, row in rows.items() if "outcomes" in row}
    lines = [
        [
            name,
            row["class"],
            row["given"],
            row["gradients"],
            *(_cell(row["outcomes"].get(preset)) for preset in presets),
        ]
        for name, row in compared.items()
    ]
    headers = ["architecture", "class", "is given", "gradients not 0", *presets]
    parts = [
        summary(record),
        _conditions(record),
        tabulate(lines, headers, "github", disable_numparse=True),
    ]
    details = [
        f"- {name}, {preset}: {outcome['verdict']}: {outcome['detail']}"
        for name, row in compared.items()
        for preset, outcome in row["outcomes"].items()
        if outcome["verdict"] in ("close", "refused", "wrong")
    ]
    details += [f"- {name}: its loss is not finite" for name, row in compared.items() if not row["finite"]]
    parts += ["What is not bitwise:", "\n".join(details)] if details else []
    others = [
        [name, row["class"], row.get("not built") or f"without a policy, twice: {row['differs without a policy']}"]
        for name, row in rows.items()
        if name not in compared
    ]
    if others:
        parts += ["Not compared:", tabulate(others, ["architecture", "class", "why"], "github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def _conditions(record: dict[str, Any]) -> str:
    machine = record["machine"]
    where = machine["gpu"] or machine["cpu"]
    kernels = "Kernels round in their own way: where they stand in, gradients may be close, as one vector a step."
    if record["device"] == "cpu" and "auto" in record["presets"]:
        kernels += " On a CPU `auto` has none, so it is compared bit for bit, too."
    return (
        f"{record.get('steps', 2)} steps of SGD of tiny models in training mode, with dropout, on {where} in "
        f"{record['dtype']}: losses, gradients, and parameters and buffers afterwards, compared bit for bit with those "
        "without a policy. "
        f"{kernels} A cell says how many bytes of saved tensors were dropped, in all steps, and how many "
        "of the regions ran as captured code in the end.\n\n"
        f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}, "
        f"{machine['date'][:10]}: `{record['command']}`"
    )


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not tried"
    if outcome["verdict"] in ("bitwise", "close"):
        mark = "✓" if outcome["verdict"] == "bitwise" else "close,"
        captured = f", {outcome['captured']}/{outcome['regions']}" if "captured" in outcome else ""
        return f"{mark} {humanize(outcome['dropped_nbytes'])}{captured}"
    return {"idle": "nothing", "refused": "refused", "wrong": "WRONG"}[outcome["verdict"]]
