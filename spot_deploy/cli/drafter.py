"""`spot-deploy drafter`."""

from __future__ import annotations

from pathlib import Path

import click

from spot_deploy.cli.common import emit, json_option


@click.group("drafter")
def command() -> None:
    """Order models made elsewhere."""


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@json_option
def import_command(file: Path, output: Path, force: bool, as_json: bool) -> None:
    """Turn a released order model, FILE.pt, into a folder that export and train-drafter --init take."""
    from spot_deploy.cli.export import require_packages
    from spot_deploy.engines.files import sha256, staged_folder

    require_packages("drafter import")
    from spot_deploy.export.order_model import save_order_model
    from spot_deploy.export.released_order_model import import_order_model

    model, taken = import_order_model(file)
    card: dict[str, object] = {"imported_from": file.name, "sha256": sha256(file), "taken_from": taken}
    with staged_folder(output, force=force, ours=lambda folder: (folder / "order_model.json").is_file()) as stage:
        save_order_model(model, stage, card)
    document = {"output": str(output), "parameters": sum(p.numel() for p in model.parameters()), **card}
    if as_json:
        emit(document)
        return
    click.echo(f"{output}: {document['parameters']} parameters from {file.name}", err=True)
    click.echo(
        "the shapes fit; whether its features mean what ours do, only a measurement shows: "
        "spot-deploy export --order-model, then eval-drafter",
        err=True,
    )
