"""`spot-deploy build-engine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spot_deploy.cli.common import MAX_THREADS, backend_option, bundle_argument, emit, json_option, spinner
from spot_deploy.engines.backends import PRECISIONS
from spot_deploy.engines.contracts import LAYOUTS

if TYPE_CHECKING:
    from spot_deploy.engines.record import EngineRecord


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
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="What to compute in. Default: bf16 where the processor has units for it.",
)
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads of the engine. Default: the cores of this process."
)
@click.option("--force", is_flag=True, help="Build even if the engine is up to date.")
@json_option
def command(
    bundle: Path, backend: str, layout: str, precision: str | None, threads: int | None, force: bool, as_json: bool
) -> None:
    """Make BUNDLE's engine: probe whether states depend on batch mates, replay the golden traces, record both."""
    from spot_deploy.building import build_engine

    with spinner(f"checking {backend}"):
        record, built = build_engine(
            bundle, backend=backend, layout=layout, precision=precision, threads=threads, force=force
        )
    if as_json:
        emit({"built": built} | asdict(record))
        return
    verdict = "strictly exact" if record.exact else f"not bit-exact ({record.probe['unequal']} unequal)"
    facts = [
        f"{record.layout}, {record.precision}, {record.threads} threads",
        f"{verdict} in {record.probe['comparisons']} comparisons",
        golden_commits(record),
        *([] if built else ["up to date"]),
    ]
    click.echo(f"{backend}: " + "; ".join(facts), err=True)
    click.echo(f'next: spot-deploy run {bundle} --chat --prompt "TEXT"', err=True)


def golden_commits(record: EngineRecord) -> str:
    """What the replay of the golden traces saw, in words."""
    differ = [n for n in record.smoke["first_differences"] if n is not None]
    if not differ:
        return f"{record.smoke['commits']} golden commits equal"
    return f"{len(differ)} of {record.smoke['traces']} golden traces differ from float32, first at commit {min(differ)}"
