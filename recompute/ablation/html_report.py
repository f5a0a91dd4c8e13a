"""One page on an ablation that opens without a network: its tables, its plots, its configuration and the machine."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

from tabulate import tabulate


class Section(NamedTuple):
    """A table with its title. The first line of the cells has the names of the columns."""

    title: str
    cells: Sequence[Sequence[str]]


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 0.2em 0.8em; white-space: nowrap; }
th { text-align: left; border-bottom: 2px solid #888; }
td { font-variant-numeric: tabular-nums; }
tr:hover { background: #f4f4f4; }
.wide { overflow-x: auto; }
img { max-width: 100%; }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; }
.problems { color: #a00; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$description</p>
<pre>$command</pre>
$problems
$body
<h2>Configuration</h2>
<pre>$config</pre>
<h2>Machine</h2>
<pre>$machine</pre>
</body>
</html>
""")


def page(
    results: Mapping[str, Any],
    description: str,
    problems: Sequence[str],
    sections: Sequence[Section],
    pictures: Mapping[str, bytes],
) -> str:
    """The page as HTML.

    results: what ``results.json`` holds. problems: a line for each row that is not as it should be. pictures: PNG
    files by their names, which become part of the page.
    """
    listed = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    body = [
        f'<h2>{html.escape(each.title)}</h2>\n<div class="wide">{_table(each.cells)}</div>' for each in sections
    ] + [
        f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></p>'
        for name, data in pictures.items()
    ]
    return _PAGE.substitute(
        title="Policies compared",
        description=html.escape(description),
        command=html.escape(results["command"]),
        problems=f'<ul class="problems">{listed}</ul>' if problems else "",
        body="\n".join(body),
        config=html.escape(json.dumps(results["config"], indent=2)),
        machine=html.escape(json.dumps(results["machine"], indent=2)),
    )


def _table(cells: Sequence[Sequence[str]]) -> str:
    align = ["left", *["right"] * (len(cells[0]) - 1)]
    return tabulate(cells, "firstrow", "html", colalign=align, disable_numparse=True)
