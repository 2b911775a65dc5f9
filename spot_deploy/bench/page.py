"""`report`: tables as Markdown, figures as SVG and PNG, and one HTML page that holds all of it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from spot_deploy.bench.figures import figures
from spot_deploy.bench.results import Results, Table, tables
from spot_deploy.engines.files import atomic_path, write_text

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>spot-deploy bench: {{ bundle }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; }
table { border-collapse: collapse; margin: 0 0 2em; } caption { text-align: left; font-weight: 600; padding: .4em 0; }
td, th { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 0 0 2em; overflow-x: auto; } pre { overflow-x: auto; }
</style></head><body>
<h1>spot-deploy bench: {{ bundle }}</h1>
<p>{{ summary }}</p>
{% for line in broken %}<p><strong>{{ line }}</strong></p>{% endfor %}
{% for svg, caption in figures %}<figure>{{ svg }}<figcaption>{{ caption }}</figcaption></figure>{% endfor %}
{% for table in tables %}<table><caption>{{ table.caption }}</caption>
<tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
<h2>How it was measured</h2><pre>{{ header }}</pre>
</body></html>
"""


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `report.html`, `tables.md` and every figure as SVG and PNG; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    made, drawn = tables(results), figures(results)
    written = []
    for name, (figure, _) in drawn.items():
        for kind in ("svg", "png"):
            path = folder / f"{name}.{kind}"
            with atomic_path(path) as temporary:
                temporary.write_bytes(_image(figure, kind))
            written.append(path)
    write_text(folder / "tables.md", "\n\n".join(map(markdown, made)) + "\n")
    checked, broken = results.identities()
    summary = f"{len(results.prompts)} decodes measured; {checked - len(broken)} of {checked} identities hold."
    page = (
        jinja2.Environment(autoescape=True, trim_blocks=True)
        .from_string(_PAGE)
        .render(
            bundle=results.config["bundle"],
            summary=summary,
            broken=broken,
            figures=[(_inline(figure), caption) for figure, caption in drawn.values()],
            tables=made,
            header=json.dumps(results.header, indent=1),
        )
    )
    write_text(folder / "report.html", page)
    return [folder / "report.html", folder / "tables.md", *written]


def markdown(table: Table) -> str:
    """A table in Markdown, its caption before it."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "| " + " | ".join("---" for _ in table.columns) + " |"
    return "\n".join([f"{table.caption}", "", line(table.columns), rule, *map(line, table.rows)])


def _inline(figure: Figure) -> Markup:
    """An SVG without the prologue that a page has no place for."""
    return Markup("<svg" + _image(figure, "svg").decode().partition("<svg")[2])


def _image(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
