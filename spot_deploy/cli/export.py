"""`spot-deploy export`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from spot_deploy.cli.common import WholeNumbers, Words, emit, json_option, spinner
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError

EXPORT_PACKAGES = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir", "onnxruntime")


def require_packages(verb: str, names: tuple[str, ...] = EXPORT_PACKAGES) -> None:
    """Check for packages of the extra `export`.

    Raises:
        SpotDeployError: some are missing (exit code 4; the error names the extra).
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SpotDeployError(
            "export-packages",
            f"{verb} needs packages that are not installed",
            seen=f"missing: {', '.join(missing)}",
            fix='pip install "spot-deploy[export]"',
            exit_code=ENVIRONMENT,
        )


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle to write.")
@click.option(
    "--order-model", type=click.Path(path_type=Path), help="Folder of a trained order model. Without: no drafting."
)
@click.option("--block-width", type=click.IntRange(1, 64), help="Where the checkpoint does not say, or to override it.")
@click.option("--mask-id", type=click.IntRange(0), help="Where the checkpoint does not say, or to override it.")
@click.option(
    "--stop-ids", type=WholeNumbers(2**24), help="Ids that end a text, where the checkpoint does not say: 2 or 2,5."
)
@click.option("--max-positions", type=click.IntRange(1), help="Capacity: prompt and generation, in positions.")
@click.option(
    "--budgets", type=WholeNumbers(), default="0,1,2,3,6,8,12,20", show_default=True, help="Draft budgets to probe."
)
@click.option("--budget", type=click.IntRange(0), default=8, show_default=True, help="Default draft budget.")
@click.option("--gamma", type=click.FloatRange(0), default=0.0, show_default=True, help="Default mass floor.")
@click.option(
    "--parity",
    type=click.Choice(("full", "layers", "none")),
    default="full",
    show_default=True,
    help="Gates against the native transformers class; a failure ends with exit code 3.",
)
@click.option(
    "--precisions",
    type=Words(),
    default="",
    help="Further target graphs: f16, bf16 (for TensorRT); int8, int4 (weights of linear layers, for CPU). f32 is "
    "always written.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@json_option
def command(
    checkpoint: Path,
    output: Path,
    order_model: Path | None,
    block_width: int | None,
    mask_id: int | None,
    stop_ids: tuple[int, ...] | None,
    max_positions: int | None,
    budgets: tuple[int, ...],
    budget: int,
    gamma: float,
    parity: str,
    precisions: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Trace CHECKPOINT (a Hugging Face folder) and an order model to ONNX, check them, and write a bundle."""
    require_packages("export")
    from spot_deploy.export.bundle_writer import ExportOptions, export_bundle

    options = ExportOptions(
        block_width=block_width,
        mask_id=mask_id,
        stop_ids=stop_ids,
        max_positions=max_positions,
        parity=parity,
        precisions=precisions,
        budgets=budgets,
        budget=budget,
        gamma=gamma,
    )
    with spinner("loading torch") as say:
        manifest = export_bundle(checkpoint, output, order_model=order_model, options=options, force=force, say=say)
    size = sum(f.bytes for f in manifest.files)
    gates = len(manifest.parity["measured"])
    if as_json:
        emit({"bundle": str(output), "bundle_id": manifest.bundle_id, "bytes": size, "parity": dict(manifest.parity)})
    else:
        decoding, family = manifest.decoding, manifest.source["family"]
        stops = ", ".join(map(str, decoding.stop_ids))
        click.echo(f"{family}, block width {decoding.block_width}, mask {decoding.mask_id}, stop {stops}", err=True)
        click.echo(f"{output}: {size / 1e6:.1f} MB, parity {parity} ({gates} gates passed)", err=True)
        click.echo(f"next: spot-deploy build-engine {output}", err=True)
