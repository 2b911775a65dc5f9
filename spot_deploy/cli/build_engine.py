"""`spot-deploy build-engine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spot_deploy.cli.common import backend_option, bundle_argument, emit, json_option, spinner
from spot_deploy.engines.contracts import LAYOUTS


@click.command("build-engine")
@bundle_argument
@backend_option
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default=LAYOUTS[0],
    show_default=True,
    help="Attention layout: split is bit-exact in its batch mates.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of the engine. Default: the cores of this process.")
@click.option("--force", is_flag=True, help="Build even if the engine is up to date.")
@json_option
def command(bundle: Path, backend: str, layout: str, threads: int | None, force: bool, as_json: bool) -> None:
    """Make BUNDLE's engine: probe whether states depend on batch mates, replay the golden traces, record both."""
    from spot_deploy.building import build_engine

    with spinner(f"probing {backend}"):
        record, built = build_engine(bundle, backend=backend, layout=layout, threads=threads, force=force)
    if as_json:
        emit({"built": built} | asdict(record))
        return
    verdict = "strictly exact" if record.exact else f"not bit-exact ({record.probe['unequal']} unequal)"
    click.echo(
        f"{backend}, {record.layout}, {record.threads} threads: {verdict}, {record.probe['comparisons']} comparisons; "
        f"{record.smoke['commits']} golden commits equal" + ("" if built else " (up to date)"),
        err=True,
    )
    click.echo(f'next: spot-deploy run {bundle} --prompt "TEXT"', err=True)
