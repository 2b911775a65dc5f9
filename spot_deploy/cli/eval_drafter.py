"""`spot-deploy eval-drafter`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from spot_deploy.cli.common import (
    WholeNumbers,
    Words,
    backend_option,
    bundle_argument,
    chat_option,
    emit,
    json_option,
    limit_option,
    progress_bar,
    prompts_option,
    threads_option,
)
from spot_deploy.engines.errors import usage_error


@click.command("eval-drafter")
@bundle_argument
@prompts_option
@chat_option
@click.option("--budgets", type=WholeNumbers(), default="3,8,20", show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True)
@click.option("--gamma", type=click.FloatRange(0), help="Mass floor. [bundle's default]")
@click.option("--seed", type=click.IntRange(0, 2**63), default=0, show_default=True, help="Prompt n takes seed + n.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Fixed length, past stop tokens.")
@click.option(
    "--order-model",
    "order_models",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Another order model to measure on this target as well, as train-drafter writes it; may be given again.",
)
@click.option("--kinds", type=Words(), help="Measure prompts of these kinds only, comma-separated.")
@limit_option
@backend_option
@threads_option
@json_option
def command(
    bundle: Path,
    prompts: Path,
    chat: bool,
    budgets: tuple[int, ...],
    order_models: tuple[Path, ...],
    kinds: tuple[str, ...],
    limit: int | None,
    backend: str,
    threads: int | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Passes per prompt of BUNDLE's order model at each budget, against oracles that know the true order.

    position: true positions, stale top tokens. joint t: true positions, and the true token if it is among the t stale
    candidates. Coverage: share of the 8 commits after the root whose token is the stale argmax. Right: texts that are
    the prompt's `answer`, where it has one. p: mean probability of the committed tokens.
    """
    from spot_deploy.runtime.api import Runtime
    from spot_deploy.runtime.decode import DecodeOptions
    from spot_deploy.training.evaluation import evaluate
    from spot_deploy.training.prompts import read_prompts

    if not any(budgets):
        raise usage_error("options", f"budgets are {budgets}", wanted="at least one above 0", fix="--budgets 3,8,20")
    chosen = read_prompts(prompts, limit, kinds or ())
    others = {}
    if order_models:
        from spot_deploy.cli.export import require_packages

        require_packages("eval-drafter --order-model")
        from spot_deploy.export.order_model import TorchOrderModel, load_order_model

        others = {str(folder): TorchOrderModel(load_order_model(folder)[0]) for folder in order_models}
    options = DecodeOptions(**choices)
    with Runtime.load(bundle, backend=backend, threads=threads) as runtime, progress_bar("prompts", len(chosen)) as bar:
        result = evaluate(runtime, chosen, chat=chat, budgets=budgets, options=options, others=others, progress=bar)
    if as_json:
        emit(result)
        return
    _print_tables(result, [b for b in budgets if b])


def _print_tables(result: dict[str, Any], budgets: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, header_style="bold", title="passes per prompt", title_justify="left")
    for name in ("kind", "prompts", "right", "coverage", "p", "D0", "drafter", *(f"D{b}" for b in budgets)):
        table.add_column(name, justify="left" if name in ("kind", "drafter") else "right", no_wrap=True)
    for kind, row in result["kinds"].items():
        right = "-" if row["exact_match"] is None else f"{row['exact_match']:.2f}"
        p = "-" if row["committed_probability"] is None else f"{row['committed_probability']:.3f}"
        lead = [kind, str(row["prompts"]), right, f"{row['stale_coverage']:.3f}", p, f"{row['draft_free']:.1f}"]
        for name, passes in row["passes"].items():
            cells = [f"{passes[str(b)]:.1f} ({row['draft_free'] / passes[str(b)]:.2f}x)" for b in budgets]
            table.add_row(*lead, name, *cells)
            lead = [""] * len(lead)
    console.print(table)
    if result["accuracy_by_depth"]:
        table = Table(box=None, header_style="bold", title="next-commit accuracy by depth", title_justify="left")
        for name in ("depth", "order model", "stale confidence", "examples"):
            table.add_column(name, justify="right")
        for depth, row in result["accuracy_by_depth"].items():
            table.add_row(depth, f"{row['model']:.3f}", f"{row['stale_confidence']:.3f}", str(row["examples"]))
        console.print(table)
