"""`spot-deploy build-engine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spot_deploy.cli.common import (
    MAX_THREADS,
    WholeNumbers,
    backend_option,
    bundle_argument,
    emit,
    json_option,
    spinner,
    stderr_console,
)
from spot_deploy.engines.backends import PORTABLE
from spot_deploy.engines.contracts import GRAPH_PRECISIONS, LAYOUTS

if TYPE_CHECKING:
    from rich.console import Console

    from spot_deploy.building import Plan
    from spot_deploy.engines.record import EngineRecord


@click.command("build-engine")
@bundle_argument
@backend_option
@click.option("--provider", help="Part of the backend that executes. ONNX Runtime: cpu, cuda or tensorrt.")
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="Attention layout. split is bit-exact in its batch mates. Default: split on CPU backends, packed on TensorRT.",
)
@click.option(
    "--precision",
    type=click.Choice(GRAPH_PRECISIONS),
    help="What to compute in. Default: bf16 where the processor has units for it, f32 elsewhere. What is neither needs "
    "a bundle exported with --precisions.",
)
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads of the engine. Default: the cores of this process."
)
@click.option("--budgets", type=WholeNumbers(), help="Draft budgets to serve. [bundle's]")
@click.option(
    "--requests", type=click.IntRange(1, 64), default=1, show_default=True, help="Requests in one pass at most."
)
@click.option(
    "--target", "targets", multiple=True, metavar="smXY", help="Compute capability to compile for; repeatable."
)
@click.option(
    "--portable",
    multiple=True,
    type=click.Choice(PORTABLE),
    help="TensorRT: an engine for later versions of TensorRT, for every GPU of this one's compute capability, or for "
    "sm80 and above; repeatable. TensorRT for RTX: use --target.",
)
@click.option(
    "--strip", is_flag=True, help="TensorRT: an engine without weights; they come from the bundle at loading."
)
@click.option("--force", is_flag=True, help="Build even if the engine is up to date.")
@click.option("--explain", is_flag=True, help="Say what differs from the engine that is there; build nothing.")
@click.option("--dry-run", is_flag=True, help="Show profiles, memory and disk; build nothing.")
@click.option("--ignore-limits", is_flag=True, help="Build even if memory or disk is expected to run out.")
@json_option
def command(
    bundle: Path, force: bool, explain: bool, dry_run: bool, ignore_limits: bool, as_json: bool, **choices: Any
) -> None:
    """Make BUNDLE's engine for a backend and this machine, and prove it.

    The golden pass and traces of the bundle are replayed, states alone are compared with states among others, and where
    they differ drafted decoding is audited. An engine that fails is not published; the one that was there stays. A
    bundle has one engine of a backend: building in another precision or layout replaces it.
    """
    from spot_deploy.building import BuildOptions, build_planned, plan_build
    from spot_deploy.runtime.text import TEMPLATE

    options = BuildOptions(**choices)
    plan = plan_build(bundle, options)
    if explain or dry_run:
        if as_json:
            emit({"up_to_date": plan.up_to_date, "changes": plan.changes} | _plan_document(plan))
        else:
            _show_plan(plan, bundle, whole=dry_run)
        return
    before = plan.replaces
    last = plan.last_seconds
    text = f"building for {options.backend}" + (f" (last time {last:.0f} s)" if last else "")
    with spinner(text) as say:
        record, built = build_planned(
            plan,
            force=force,
            check_limits=not ignore_limits,
            in_child=True,
            say=lambda step: say(f"{text}: {step}"),
        )
    if as_json:
        emit({"built": built} | asdict(record))
        return
    if built:
        _show_profiles([dict(profile) for profile in record.profiles], stderr_console())
        if before is not None:
            click.echo(f"replaced the engine that was there: {before.layout}, {before.precision}", err=True)
    click.echo(f"{options.backend}: {describe(record)}" + ("" if built else "; up to date"), err=True)
    if record.probe is not None:
        chat = " --chat" if (bundle / TEMPLATE).is_file() else ""
        click.echo(f'next: spot-deploy run {bundle} --backend {options.backend}{chat} --prompt "TEXT"', err=True)


def describe(record: EngineRecord) -> str:
    """An engine in a line: how it is opened and what was proven."""
    inputs = record.inputs
    facts = [f"{inputs.layout}, {inputs.precision}" + ("" if inputs.targets else f", {inputs.threads} threads")]
    if inputs.targets:
        facts.append("for " + ", ".join(inputs.targets))
    facts += [f"portable: {way}" for way in inputs.portable] + ["without weights"] * inputs.strip
    for name, entry in record.files.items():
        facts.append(f"{name} {entry['bytes'] / 1e6:.1f} MB")
    if record.probe is None or record.smoke is None:
        return "; ".join([*facts, "cannot run on the machine that built it: nothing is proven"])
    if record.exact:
        facts.append(f"strictly exact in {record.probe['comparisons']} comparisons")
    else:
        facts.append(f"not bit-exact ({record.probe['unequal']} of {record.probe['comparisons']} unequal)")
    if record.audit is not None:
        facts.append(f"audit of {record.audit['commits']} commits: {record.audit['near_ties']} near ties, 0 violations")
    differ = [n for n in record.smoke["first_differences"] if n is not None]
    if not record.smoke["traces"]:
        return "; ".join([*facts, "no golden traces in this bundle"])
    facts.append(
        f"{len(differ)} of {record.smoke['traces']} golden traces differ from float32, first at commit {min(differ)}"
        if differ
        else f"{record.smoke['commits']} golden commits equal"
    )
    return "; ".join(facts)


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "inputs": asdict(plan.inputs),
        "profiles": [asdict(profile) for profile in plan.profiles],
        "estimate": asdict(plan.estimate),
        "last_seconds": plan.last_seconds,
    }


def _show_plan(plan: Plan, bundle: Path, *, whole: bool) -> None:
    from rich.console import Console

    from spot_deploy.engines.record import same_build

    inputs = plan.inputs
    if plan.changes is None:
        click.echo("there is no engine of this backend that can be read: it would be built")
    elif plan.up_to_date:
        click.echo("up to date: nothing differs from the engine that is there")
    for line in plan.changes or []:
        click.echo(f"changed  {line}")
    if not whole:
        return
    estimate = plan.estimate
    free = ["unknown" if n is None else f"{n / 1e9:.2f} GB free" for n in (estimate.memory_free, estimate.disk_free)]
    click.echo(f"memory   about {estimate.memory / 1e9:.2f} GB ({free[0]})")
    click.echo(f"disk     about {estimate.disk / 1e6:.1f} MB ({free[1]}), in {bundle}/engines/{inputs.backend}")
    click.echo(f"command  {same_build(bundle, inputs)}")
    _show_profiles([asdict(profile) for profile in plan.profiles], Console(highlight=False, soft_wrap=True))


def _show_profiles(profiles: list[dict[str, Any]], console: Console) -> None:
    """Least, best and largest of every free size."""
    from rich.table import Table

    meaning = {"R": "requests", "S": "states", "Q": "positions", "P": "prefix", "M": "rows"}
    table = Table("profile", *meaning.values(), box=None, header_style="bold")
    for profile in profiles:
        sizes = [list(profile["symbols"][symbol]) for symbol in meaning]
        table.add_row(profile["role"], *(str(a) if a == c else f"{a}-{c}, best {b}" for a, b, c in sizes))
    console.print(table)
