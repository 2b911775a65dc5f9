"""`spot-deploy doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spot_deploy.cli.common import emit, json_option


@click.command("doctor")
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path))
@click.option("--clean", is_flag=True, help="Delete what interrupted runs left beside and inside the bundles.")
@json_option
def command(bundles: tuple[Path, ...], clean: bool, as_json: bool) -> None:
    """Say what this machine can run, and why not the rest; check BUNDLES and their engines.

    Looks for leftovers of interrupted runs in the current folder, and beside and inside the bundles. Exit code 1 if a
    bundle or an engine has a fault.
    """
    from spot_deploy.diagnosis import diagnose

    report = diagnose(bundles, clean=clean)
    if as_json:
        emit(report)
    else:
        _show(report)
    if any(bundle["faults"] for bundle in report["bundles"]):
        click.get_current_context().exit(1)


def _show(report: dict[str, Any]) -> None:
    for name, text in report["machine"].items():
        click.echo(f"{name:12}{text}")
    click.echo("backends")
    for backend in report["backends"]:
        mark = "can run" if backend["runs"] else "no" if not backend["builds"] else "can build, not run"
        click.echo(f"  {backend['name']:24}{mark}: {backend['why']}")
        click.echo(f"  {'':24}seen to work by its makers: {backend['proven']}")
    click.echo("packages")
    for name, version in report["packages"].items():
        click.echo(f"  {name:24}{version or 'not installed'}")
    for bundle in report["bundles"]:
        click.echo(f"bundle      {bundle['path']}")
        for engine in bundle["engines"]:
            click.echo(f"  {engine['backend']:24}{engine['text']}")
        for fault in bundle["faults"]:
            click.echo(f"  FAULT {fault}")
    if not report["leftovers"]:
        click.echo("leftover    none")
    for left in report["leftovers"]:
        fate = "deleted" if left["deleted"] else "in use by a process that runs" if left["in_use"] else "left"
        click.echo(f"leftover    {left['path']} ({left['bytes'] / 1e6:.1f} MB), {fate}")
    if any(not left["deleted"] and not left["in_use"] for left in report["leftovers"]):
        click.echo("these are safe to delete when no other run is at work: spot-deploy doctor --clean")
