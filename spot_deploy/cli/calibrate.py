"""`spot-deploy calibrate`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spot_deploy.cli.common import (
    WholeNumbers,
    backend_option,
    bundle_argument,
    chat_option,
    emit,
    json_option,
    limit_option,
    progress_bar,
    prompts_option,
)
from spot_deploy.engines.errors import usage_error


@click.command("calibrate")
@bundle_argument
@prompts_option
@chat_option
@click.option("--budgets", type=WholeNumbers(), help="To choose among. [those of the engine]")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63), default=0, show_default=True, help="Prompt n takes seed + n.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--curve-seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="Timing passes.")
@click.option("--dry-run", is_flag=True, help="Measure and show; write nothing.")
@limit_option
@backend_option
@json_option
def command(
    bundle: Path,
    prompts: Path,
    chat: bool,
    budgets: tuple[int, ...] | None,
    limit: int | None,
    backend: str,
    curve_seconds: float,
    dry_run: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Measure what is fastest with BUNDLE's engine on this machine, and make it the engine's default.

    Prompts are decoded draft-free; what each budget and mass floor would accept follows from that, and what it would
    cost from timing the engine's passes. Budget 0, no drafts, is among the choices. A new engine has no such defaults.
    """
    from spot_deploy.calibration import calibrate
    from spot_deploy.costs import CurveOptions
    from spot_deploy.engines.defaults import write_defaults
    from spot_deploy.engines.record import open_record
    from spot_deploy.runtime.api import Runtime
    from spot_deploy.runtime.bundle import open_bundle
    from spot_deploy.runtime.decode import DecodeOptions
    from spot_deploy.training.prompts import read_prompts

    chosen = read_prompts(prompts, limit)
    opened = open_bundle(bundle)
    record = open_record(bundle, backend, opened.manifest.bundle_id)
    among = budgets or record.inputs.budgets
    if not any(among) or max(among) > record.inputs.budgets[-1]:
        raise usage_error(
            "budgets",
            "these budgets cannot be compared",
            seen=",".join(map(str, among)),
            wanted=f"some above 0, up to {record.inputs.budgets[-1]}, which the engine was built for",
            fix="choose others, or build-engine --budgets",
        )
    session = opened.open_target(record)
    with (
        Runtime.from_bundle(opened, record, target=session) as runtime,
        progress_bar("prompts", len(chosen)) as bar,
    ):
        defaults, evidence = calibrate(
            runtime, session, chosen, chat=chat, budgets=among, options=DecodeOptions(**choices),
            curve=CurveOptions((), seconds=curve_seconds), progress=bar,
        )  # fmt: skip
    if not dry_run:
        write_defaults(bundle, backend, defaults, evidence)
    if as_json:
        emit({"defaults": asdict(defaults), "written": not dry_run, "evidence": evidence})
        return
    _show(evidence)
    chosen_text = (
        f"budget {defaults.budget}, gamma {defaults.gamma:g}, tau {defaults.tau:g}, gate {defaults.hedge_gate:g}"
    )
    click.echo(f"fastest here: {chosen_text}" + ("" if dry_run else f"; now the default of the {backend} engine"))


def _show(evidence: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    floors = sorted({row["gamma"] for row in evidence["grid"]})
    table = Table(box=None, header_style="bold", title="passes (predicted speedup) by mass floor", title_justify="left")
    table.add_column("budget", justify="right")
    for gamma in floors:
        table.add_column(f"gamma {gamma:g}", justify="right")
    for budget in sorted({row["budget"] for row in evidence["grid"]}):
        cells = {row["gamma"]: row for row in evidence["grid"] if row["budget"] == budget}
        texts = [f"{cells[g]['passes']} ({cells[g]['speedup']:.2f}x)" if g in cells else "" for g in floors]
        table.add_row(str(budget), *texts)
    console.print(table)
    table = Table(box=None, header_style="bold", title="mass against acceptance", title_justify="left")
    for name in ("mass", "states", "mean mass", "accepted"):
        table.add_column(name, justify="right")
    for row in evidence["reliability"]:
        table.add_row(
            f"{row['low']:g}-{row['high']:g}", str(row["states"]), f"{row['mass']:.3f}", f"{row['accepted']:.3f}"
        )
    console.print(table)
