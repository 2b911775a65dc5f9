"""`spot-deploy record`."""

from __future__ import annotations

from pathlib import Path

import click

from spot_deploy.cli.common import (
    Numbers,
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


@click.command("record")
@bundle_argument
@prompts_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of records.")
@chat_option
@click.option("--temperatures", type=Numbers(), default="0,1", show_default=True, help="Taken in turn.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@limit_option
@click.option("--seed", type=click.IntRange(0, 2**63), default=0, show_default=True)
@backend_option
@threads_option
@json_option
def command(
    bundle: Path,
    prompts: Path,
    output: Path,
    chat: bool,
    temperatures: tuple[float, ...],
    max_new_tokens: int,
    limit: int | None,
    seed: int,
    backend: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Decode prompts with BUNDLE draft-free and record every pass. Goes on where it stopped."""
    from spot_deploy.cli.export import require_packages
    from spot_deploy.runtime.api import Runtime
    from spot_deploy.runtime.decode import DecodeOptions
    from spot_deploy.training.prompts import read_prompts
    from spot_deploy.training.recording import record

    require_packages("record")
    for temperature in temperatures:
        DecodeOptions(temperature=temperature, seed=seed)  # raises where one is out of range
    chosen = read_prompts(prompts, limit)
    with Runtime.load(bundle, backend=backend, threads=threads) as runtime, progress_bar("prompts", len(chosen)) as bar:
        passes = record(
            runtime,
            chosen,
            output,
            chat=chat,
            temperatures=temperatures,
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=bar,
        )
    if as_json:
        emit({"records": str(output), "prompts": len(chosen), "passes_recorded_now": passes})
