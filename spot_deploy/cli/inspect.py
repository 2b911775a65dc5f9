"""`spot-deploy inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spot_deploy.cli.common import bundle_argument, emit, json_option


@click.command("inspect")
@bundle_argument
@json_option
def command(bundle: Path, as_json: bool) -> None:
    """Check BUNDLE's files and show what it holds."""
    from spot_deploy.engines.backends import BACKENDS
    from spot_deploy.engines.record import read_record, record_path
    from spot_deploy.runtime.bundle import open_bundle
    from spot_deploy.runtime.manifest import to_document

    opened = open_bundle(bundle)
    manifest = opened.manifest
    engines = {}
    for backend in BACKENDS:
        if record_path(bundle, backend).is_file():
            engines[backend] = read_record(bundle, backend, manifest.bundle_id, here=False)
    if as_json:
        emit(to_document(manifest) | {"engines": {name: asdict(record) for name, record in engines.items()}})
        return
    decoding, speculation, source = manifest.decoding, manifest.speculation, manifest.source
    lines = {
        "bundle": f"{manifest.bundle_id[:16]}  ({manifest.created_by}, {manifest.created_at})",
        "target": f"{source['family']} {source['checkpoint']}, {manifest.precision}, vocabulary {decoding.shape.vocab}",
        "block": f"{decoding.block_width} positions, confidence {decoding.confidence}",
        "capacity": f"{decoding.max_positions} positions, prefix buckets {', '.join(map(str, decoding.buckets))}",
        "tokens": f"mask {decoding.mask_id}, stop {', '.join(map(str, decoding.stop_ids))}, bos {decoding.bos_id}",
        "drafting": (
            f"order model; budget {speculation.budget} of {', '.join(map(str, speculation.budgets))}, "
            f"gamma {speculation.gamma}"
            if speculation.order_model
            else "none (exported without an order model)"
        ),
        "parity": f"{manifest.parity['mode']}, {len(manifest.parity['measured'])} gates passed",
    }
    for name, text in lines.items():
        click.echo(f"{name:10}{text}")
    click.echo("graphs")
    for role, entry in manifest.graphs.items():
        click.echo(f"  {role:14}{entry['file']}, opset {entry['opset']}")
        for kind in ("inputs", "outputs"):
            for tensor in entry["signature"][kind]:
                click.echo(f"    {kind[:-1]:7}{tensor['name']:16}{tensor['dtype']:8} {tensor['shape']}")
    click.echo("files")
    for file in manifest.files:
        click.echo(f"  {file.bytes:>12,}  {file.sha256[:16]}  {file.path}")
    for name, record in engines.items():
        exact = (
            f"strictly exact up to budget {record.exact_budget(record.threads)}" if record.exact else "not bit-exact"
        )
        how = f"{record.layout}, {record.precision}, {record.threads} threads, {exact}"
        click.echo(f"engine    {name}: {how}, {dict(record.versions)}")
