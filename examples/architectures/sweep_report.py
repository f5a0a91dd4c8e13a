"""The report of a sweep: a summary, a row for each item that was compared, and why the others were not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tabulate import tabulate

Row = dict[str, Any]
VERDICTS = {"bitwise": "bitwise", "close": "close", "idle": "nothing governed", "refused": "refused", "wrong": "wrong"}


def summary(record: dict[str, Any]) -> str:
    """How many items were tried and compared, and how each preset did."""
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
    parts = [
        f"Of {len(rows)} {record['what']}, {len(compared)} were compared, {unlike} compute other bits each time "
        f"without a policy, and {len(rows) - len(compared) - unlike} were not built. Wrong: {wrong}.",
        tabulate(counts, ["preset", *VERDICTS.values(), "regions captured"], "github"),
    ]
    if record["groups"]:
        parts.append(groups(record))
    return "\n\n".join(parts)


def groups(record: dict[str, Any]) -> str:
    """How each preset did in each group of rows."""
    lines: dict[str, list[Any]] = {}
    for row in record["rows"].values():
        lines.setdefault(row[record["groups"]], []).append(row)
    table = [
        [group, len(rows), *(_verdicts(rows, preset) for preset in record["presets"])]
        for group, rows in sorted(lines.items())
    ]
    return tabulate(table, [record["groups"], record["what"], *record["presets"]], "github")


def _verdicts(rows: list[Row], preset: str) -> str:
    found = [row.get("outcomes", {}).get(preset, {"verdict": "not compared"})["verdict"] for row in rows]
    counts = Counter(VERDICTS.get(verdict, verdict) for verdict in found)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def report(record: dict[str, Any]) -> str:
    """results.md."""
    rows: dict[str, Row] = record["rows"]
    presets, columns = record["presets"], record["columns"]
    compared = {name: row for name, row in rows.items() if "outcomes" in row}
    lines = [
        [name, *(row[key] for key in columns), *(_cell(row["outcomes"].get(preset)) for preset in presets)]
        for name, row in compared.items()
    ]
    headers = [record["what"], *columns.values(), *presets]
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
    reasons: dict[str, list[str]] = {}
    for name, row in compared.items():
        for preset, outcome in row["outcomes"].items():
            for reason in outcome.get("uncaptured", ()):
                reasons.setdefault(reason, []).append(f"{name} ({preset})")
    if reasons:
        parts += ["What does not run as captured code:"]
        parts += ["\n".join(f"- {reason}: {', '.join(dict.fromkeys(names))}" for reason, names in reasons.items())]
    others = [
        [name, row.get("not built") or f"without a policy, twice: {row['differs without a policy']}"]
        for name, row in rows.items()
        if name not in compared
    ]
    if others:
        parts += ["Not compared:", tabulate(others, [record["what"], "why"], "github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def _conditions(record: dict[str, Any]) -> str:
    machine = record["machine"]
    where = machine["gpu"] or machine["cpu"]
    packages = ", ".join(" ".join(each) for each in record["packages"].items())
    return (
        f"{record['about']}. Losses, gradients, and parameters and buffers afterwards are compared bit for bit with "
        "those without a policy. A cell says which share of the bytes that are held without a policy is held where "
        "backward begins, how many times as long a settled step takes in CPU time, and how many of the regions ran as "
        f"captured code in the end.\n\nOn {where} in {record['dtype']}, "
        f"torch {machine['torch']}, {packages}, Python {machine['python']}, "
        f"{machine['date'][:10]}: `{record['command']}`"
    )


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not tried"
    if outcome["verdict"] in ("bitwise", "close"):
        mark = "✓" if outcome["verdict"] == "bitwise" else "close,"
        held = f" {outcome['held']:.2f}," if outcome["held"] is not None else ""
        time = f" {outcome['time']:.2f}x," if outcome["time"] is not None else ""
        return f"{mark}{held}{time} {outcome['captured']}/{outcome['regions']}"
    return {"idle": "nothing", "refused": "refused", "wrong": "WRONG"}[outcome["verdict"]]
