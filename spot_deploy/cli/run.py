"""`spot-deploy run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spot_deploy.cli.common import (
    backend_option,
    bundle_argument,
    emit,
    json_option,
    read_prompt,
    spinner,
    stderr_console,
    threads_option,
)
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError, usage_error
from spot_deploy.runtime.decode import VERIFIERS, DecodeOptions
from spot_deploy.runtime.manifest import HEDGE_WEIGHTS, MAX_BUDGET

if TYPE_CHECKING:
    from spot_deploy.runtime.api import Result, Runtime


@click.command("run")
@bundle_argument
@click.option("--prompt", required=True, metavar="TEXT|-", help="The prompt; - reads standard input.")
@click.option("--chat", is_flag=True, help="Put the prompt into the target's chat template as the user's turn.")
@click.option("--thinking/--no-thinking", default=None, help="With --chat: the template's switch. [template's default]")
@click.option(
    "--budget", type=click.IntRange(0, MAX_BUDGET), help="Drafted states per pass; 0 is draft-free. [bundle's default]"
)
@click.option("--gamma", type=click.FloatRange(0), help="Mass floor: drop drafts of less mass. [bundle's default]")
@click.option("--tau", type=click.FloatRange(0.01, 100), help="Temperature of the order model. [bundle's default]")
@click.option(
    "--hedge-gate",
    type=click.FloatRange(0, 1),
    help="Draft a second token below this stale probability. [bundle's default]",
)
@click.option(
    "--hedge-weights", type=click.Choice(HEDGE_WEIGHTS), help="Mass of first and second token. [bundle's default]"
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="0: largest logit; else 0.01 or more.",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Addresses the noise.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Length, in tokens; the last block is always filled.",
)
@click.option("--ignore-eos", is_flag=True, help="Generate the full length, past stop tokens.")
@click.option(
    "--verifier",
    type=click.Choice(VERIFIERS),
    default=VERIFIERS[0],
    show_default=True,
    help="coupled: drafts use the noise that verification uses. uncoupled: they do not; same text, more passes at high "
    "temperature. greedy: accepts largest logits, not exact above temperature 0.",
)
@click.option("--draft-tail", is_flag=True, help="Draft tokens outside the top 32 too (temperatures well above 1).")
@click.option("--padded", is_flag=True, help="Give every pass the shape of a full budget.")
@click.option(
    "--fuse/--no-fuse", default=True, show_default=True, help="Open a block in the pass that stores the one before."
)
@click.option(
    "--whole",
    is_flag=True,
    help="Targets with full attention (LLaDA, Dream): run whole sequences, exact, in place of a frozen cache.",
)
@backend_option
@threads_option
@click.option("--stream/--no-stream", default=None, help="Show text as it settles. [default: on a terminal]")
@click.option("--compare", is_flag=True, help="Decode draft-free too; show passes and times side by side.")
@json_option
def command(
    bundle: Path,
    prompt: str,
    chat: bool,
    thinking: bool | None,
    backend: str,
    threads: int | None,
    stream: bool | None,
    compare: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Decode a prompt with BUNDLE. Text on stdout, figures on stderr."""
    from spot_deploy.runtime.api import Runtime

    if thinking is not None and not chat:
        raise usage_error("thinking", "only a chat template has a switch for thinking", fix="add --chat")
    options = DecodeOptions(**choices)
    text = read_prompt(prompt)
    given: Any = [{"role": "user", "content": text}] if chat else text
    with Runtime.load(bundle, backend=backend, threads=threads) as runtime:
        if compare and not runtime.resolve(options).budget:
            drafts = runtime.order_model is not None
            raise usage_error(
                "compare",
                "there is nothing to compare with draft-free decoding",
                seen="budget 0" if drafts else "a bundle without an order model",
                fix="--budget 1 or more" if drafts else "export again with --order-model, or leave out --compare",
            )
        show = not as_json and (sys.stdout.isatty() if stream is None else stream)
        result = _decode(runtime, given, thinking, options, show)
        control = _decode(runtime, given, thinking, replace(options, budget=0), False) if compare else None
    if control is not None and result.lossless and control.token_ids != result.token_ids:
        _raise_unequal(result, control)
    if as_json:
        document = result.as_dict()
        if control is not None:
            document["compare"] = control.as_dict() | {"identical": control.token_ids == result.token_ids}
        emit(document)
        return
    if not show:
        click.echo(result.text)
    _show_figures([result] if control is None else [control, result])
    if control is not None:
        same = control.token_ids == result.token_ids
        click.echo("the texts are identical" if same else "the texts differ (this mode is not exact)", err=True)


def _decode(runtime: Runtime, prompt: Any, thinking: bool | None, options: DecodeOptions, show: bool) -> Result:
    from spot_deploy.runtime.api import TextEvent

    if not show:
        with spinner("decoding", only_terminal=True):
            return runtime.generate(prompt, options, thinking=thinking)
    for event in runtime.stream(prompt, options, thinking=thinking):
        if isinstance(event, TextEvent):
            click.echo(event.text, nl=False)
    click.echo()
    return event.result  # type: ignore[union-attr]  # the last event is Finished


def _raise_unequal(result: Result, control: Result) -> None:
    first = next(
        (i for i, (a, b) in enumerate(zip(result.token_ids, control.token_ids, strict=False)) if a != b),
        min(len(result.token_ids), len(control.token_ids)),
    )
    raise SpotDeployError(
        "not-lossless",
        "drafted and draft-free decoding gave different texts in a mode that is exact",
        seen=f"first difference at token {first}",
        fix="run build-engine --force; if it stays, report the bundle and the prompt",
        exit_code=VERIFICATION,
    )


def _show_figures(results: Sequence[Result]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    columns = ("decoding", "passes", "prefill", "commits", "accepted", "per round", "seconds", "tokens/s")
    for name in columns:
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for r in results:
        drafted = len(r.accepted_per_round)
        table.add_row(
            "draft-free" if r.budget == 0 else f"SPOT D{r.budget}",
            str(r.nfe),
            str(r.prefill_forwards),
            str(r.commits),
            str(r.accepted),
            f"{r.accepted / drafted:.2f}" if drafted else "-",
            f"{r.seconds:.2f}",
            f"{len(r.token_ids) / r.seconds:.1f}",
        )
    console = stderr_console()
    console.print(table)
    last = results[-1]
    if last.budget:
        ends = ", ".join(f"{name} {count}" for name, count in last.rejections.items())
        console.print(f"rounds ended by: {ends}")
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in last.phases.items())
    passes = last.nfe + last.prefill_forwards + last.store_forwards
    read = f"{last.fetched / passes:,.0f} bytes read a pass"
    console.print(f"time: {phases}; exact: {last.exactness}; backend: {last.backend} {last.precision}, {read}")
    if len(results) == 2:
        control, spot = results
        console.print(
            f"passes {control.nfe} -> {spot.nfe} ({control.nfe / spot.nfe:.2f}x fewer), "
            f"time {control.seconds:.2f} -> {spot.seconds:.2f} s ({control.seconds / spot.seconds:.2f}x)"
        )
