"""`spot-deploy verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spot_deploy.cli.common import backend_option, bundle_argument, emit, json_option, spinner, stderr_console
from spot_deploy.engines.errors import VERIFICATION


@click.command("verify")
@bundle_argument
@backend_option
@json_option
@click.pass_context
def command(context: click.Context, bundle: Path, backend: str, as_json: bool) -> None:
    """Prove BUNDLE's engine again, on this machine and now.

    Six gates. elementwise, argmax: a pass whose result the checkpoint's own class gave at export. traces: its commit
    traces. isolation: other states of a pass change nothing, bit for bit. joining: a state alone against the same among
    others. equality: drafted against draft-free decoding; where joining is not bit-equal, by an audit of every commit.
    Exit code 3 if a gate fails.
    """
    from spot_deploy.engines.record import open_record
    from spot_deploy.runtime.api import Runtime
    from spot_deploy.runtime.bundle import open_bundle
    from spot_deploy.verification import verify_engine

    opened = open_bundle(bundle)
    record = open_record(bundle, backend, opened.manifest.bundle_id)
    with spinner(f"verifying {backend}") as say:
        session = opened.open_target(record)
        with Runtime.from_bundle(opened, record, target=session) as runtime:
            inputs = record.inputs
            gates = verify_engine(
                opened,
                runtime,
                session,
                precision=inputs.precision,
                budgets=inputs.budgets,
                requests=inputs.requests,
                strict_before=record.exact,
                say=lambda step: say(f"verifying {backend}: {step}"),
            )
    passed = all(gate.passed for gate in gates)
    if as_json:
        emit({"backend": backend, "passed": passed, "gates": [asdict(gate) for gate in gates]})
    else:
        from rich.table import Table

        table = Table("gate", "", "measured", box=None, header_style="bold")
        for gate in gates:
            table.add_row(gate.name, "pass" if gate.passed else "[red]FAIL[/red]", gate.text)
        stderr_console().print(table)
        click.echo("passed" if passed else "failed")
    if not passed:
        context.exit(VERIFICATION)
