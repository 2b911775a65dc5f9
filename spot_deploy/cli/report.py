"""`spot-deploy report`."""

from __future__ import annotations

from pathlib import Path

import click

from spot_deploy.cli.common import emit, json_option
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError


@click.command("report")
@click.argument("results", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write."
)
@click.option("--table", "names", multiple=True, help="Print this table as Markdown as well (see tables.md).")
@json_option
def command(results: Path, output: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Write what RESULTS of bench say: report.html (all in one page), tables.md, and figures as SVG and PNG."""
    try:
        from spot_deploy.bench.page import markdown, write_report
    except ImportError as error:
        raise SpotDeployError(
            "report-missing",
            "report draws with matplotlib, which is not installed",
            seen=str(error),
            fix='pip install "spot-deploy[report]"',
            exit_code=ENVIRONMENT,
        ) from error
    from spot_deploy.bench.results import Results, tables
    from spot_deploy.engines.errors import usage_error

    found = Results(results)
    made = {table.name: table for table in tables(found)}
    if unknown := sorted(set(names) - set(made)):
        raise usage_error("report-table", f"there is no table {unknown[0]}", wanted=", ".join(made), fix="choose one")
    written = write_report(found, output)
    _, broken = found.identities()
    if broken:
        raise SpotDeployError(
            "bench-identities",
            f"{len(broken)} identities of the results do not hold",
            seen=broken[0],
            fix="report this with the results file",
        )
    if as_json:
        emit({"written": [str(path) for path in written], "tables": list(made)})
        return
    for name in names:
        click.echo(markdown(made[name]) + "\n")
    click.echo(f"{written[0]}: {len(made)} tables; they are in {written[1].name}, figures beside it")
