"""`spot-deploy bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from spot_deploy.cli.common import emit, json_option, progress_bar, threads_option

if TYPE_CHECKING:
    from spot_deploy.bench.config import BenchConfig
    from spot_deploy.engines.contracts import OrderSession


@click.command("bench")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Results, as JSON lines.")
@click.option("--show", is_flag=True, help="Print a configuration that the package brings, and measure nothing.")
@threads_option
@json_option
def command(config: Path, output: Path | None, show: bool, threads: int | None, as_json: bool) -> None:
    """Measure what CONFIG asks for: a TOML file, or `demo` or `paper`, which the package brings.

    Every prompt is decoded draft-free; what each drafter would need at each budget follows from that, since all are
    exact. Results are appended as they are known: run it again to go on. `report` shows them.
    """
    from spot_deploy.bench.config import read_config, show_config
    from spot_deploy.bench.measure import Bench
    from spot_deploy.runtime.api import Runtime

    if show:
        click.echo(show_config(config), nl=False)
        return
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    chosen = read_config(config)
    with Runtime.load(chosen.bundle, backend=chosen.backend, threads=threads) as runtime:
        bench = Bench(chosen, runtime, _order_models(chosen))
        with progress_bar("decodes", bench.total) as bar:
            bench.run(output, bar)
    if as_json:
        emit({"results": str(output), "decodes": bench.total})
        return
    click.echo(f"{output}: {bench.total} decodes")
    click.echo(f"next: spot-deploy report {output} -o REPORT")


def _order_models(config: BenchConfig) -> dict[str, OrderSession]:
    """Those of variants that name one."""
    named = {v.name: v.order_model for v in config.variants if v.order_model is not None}
    if not named:
        return {}
    from spot_deploy.cli.export import require_packages

    require_packages("bench with order models of its own")
    from spot_deploy.export.order_model import TorchOrderModel, load_order_model

    return {name: TorchOrderModel(load_order_model(folder)[0]) for name, folder in named.items()}
