"""`spot-deploy train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spot_deploy.cli.common import MAX_THREADS, emit, json_option, progress_bar


@click.command("train-drafter")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the order model.")
@click.option("--init", type=click.Path(path_type=Path), help="Order model to start from (fine-tuning).")
@click.option("--steps", type=click.IntRange(1), default=3000, show_default=True, help="About 0.3 s each on one core.")
@click.option("--batch", type=click.IntRange(1), default=96, show_default=True, help="Examples per step.")
@click.option(
    "--learning-rate", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True, help="At its peak."
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of weights and examples.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), default=1, show_default=True, help="Of torch.")
@json_option
def command(records: tuple[Path, ...], output: Path, init: Path | None, as_json: bool, **choices: Any) -> None:
    """Train an order model on folders of RECORDS, of one target or several.

    Goes on from the output folder's training state if one is there.
    """
    from spot_deploy.cli.export import require_packages

    require_packages("train-drafter")
    from spot_deploy.training.order import TrainOptions, train
    from spot_deploy.training.records import load_records

    options = TrainOptions(**choices)
    corpus = load_records(records)
    with progress_bar("steps", options.steps) as bar:
        result = train(corpus, output, options, init=init, progress=bar)
    if as_json:
        emit({"order_model": str(output), "accuracy_by_depth": result})
        return
    for depth, row in result.items():
        click.echo(
            f"depth {depth:>2}: next-commit accuracy {row['model']:.3f}, "
            f"by stale confidence {row['stale_confidence']:.3f} ({row['examples']} examples)"
        )
