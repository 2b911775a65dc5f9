"""`spot-deploy inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spot_deploy.cli.common import bundle_argument, emit, json_option

if TYPE_CHECKING:
    from spot_deploy.export.summary import Part
    from spot_deploy.runtime.bundle import Bundle


@click.command("inspect")
@bundle_argument
@click.option("--layers", is_flag=True, help="Summarise the nodes of every graph, layer by layer.")
@json_option
def command(bundle: Path, layers: bool, as_json: bool) -> None:
    """Check BUNDLE's files and show what it holds."""
    from spot_deploy.cli.build_engine import describe
    from spot_deploy.engines.backends import BACKENDS
    from spot_deploy.engines.record import read_record, record_path
    from spot_deploy.runtime.bundle import open_bundle
    from spot_deploy.runtime.manifest import to_document

    opened = open_bundle(bundle)
    manifest = opened.manifest
    engines = {}
    for backend in BACKENDS:
        if record_path(bundle, backend).is_file():
            engines[backend] = read_record(bundle, backend)
    parts = _layers(opened) if layers else {}
    compiled = _compiled_layers(bundle, list(engines)) if layers else {}
    if as_json:
        shown = {name: asdict(record) for name, record in engines.items()}
        documents = {role: [part.as_dict() for part in found] for role, found in parts.items()}
        more = {"layers": documents, "engine_layers": compiled} if layers else {}
        emit(to_document(manifest) | {"engines": shown} | more)
        return
    decoding, speculation, source = manifest.decoding, manifest.speculation, manifest.source
    lines = {
        "bundle": f"{manifest.bundle_id[:16]}  ({manifest.created_by}, {manifest.created_at})",
        "target": f"{source['family']} {source['checkpoint']}, {manifest.precision}, vocabulary {decoding.shape.vocab}",
        "block": f"{decoding.block_width} positions, confidence {decoding.confidence}"
        + (", first token given" if decoding.given_start else ""),
        "attention": f"{decoding.attention}, "
        + ("exact cache" if decoding.exact_cache else "frozen cache (run --whole is exact)")
        + (", logits shifted by one" if decoding.logit_shift else ""),
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
        click.echo(f"engine    {name}: {describe(record)}; {dict(record.inputs.versions)}")
    if layers:
        _show_layers(parts)
        for name, found in compiled.items():
            _show_compiled(name, found)


def _layers(bundle: Bundle) -> dict[str, list[Part]]:
    from spot_deploy.cli.export import require_packages

    require_packages("inspect --layers", ("onnx_ir",))
    from spot_deploy.export.summary import graph_parts

    return {role: graph_parts(bundle.graph_path(role)) for role in bundle.manifest.graphs}


def _compiled_layers(bundle: Path, backends: list[str]) -> dict[str, list[dict[str, Any]]]:
    """By engine file, the layers that the compiler's inspector told when it was proven."""
    from spot_deploy.engines.files import read_json
    from spot_deploy.engines.record import LAYERS, engine_folder

    found = {}
    for backend in backends:
        for path in sorted(engine_folder(bundle, backend).glob(f"*{LAYERS}")):
            name = f"{backend} {path.name.removesuffix(LAYERS)}"
            found[name] = read_json(
                path, code="engine-layers", fix=f"build-engine {bundle} --backend {backend} --force"
            )
    return found


def _show_compiled(name: str, entries: list[dict[str, Any]]) -> None:
    from spot_deploy.engines.inspector import Layer, summary

    facts = summary([Layer(e["name"], e["kind"], e["tactic"], tuple(e["dtypes"])) for e in entries])
    kinds = ", ".join(f"{kind} {count}" for kind, count in facts["layers"].items())
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in facts["dtypes"].items())
    click.echo(f"layers of {name}: {len(entries)}; {kinds}; in {dtypes or 'dtypes that TensorRT does not tell'}")
    for entry in entries:
        click.echo(f"  {entry['kind']:20} {','.join(entry['dtypes']):24} {entry['name']}")


def _show_layers(parts: dict[str, list[Part]]) -> None:
    from spot_deploy.export.summary import grouped

    for role, found in parts.items():
        click.echo(f"nodes of {role}")
        for name, part in grouped(found):
            operators = ", ".join(f"{op} {count}" for op, count in part.operators.most_common())
            weights = ", ".join(f"{size / 1e6:.2f} MB {dtype}" for dtype, size in part.weights.items())
            click.echo(f"  {name}: {part.operators.total()} nodes; {operators}")
            if weights:
                click.echo(f"    constants and weights: {weights}")
