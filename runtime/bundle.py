"""Opening a bundle: every file is there and is the one that was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_deploy.engines.contracts import GraphSignature, target_role
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import sha256
from spot_deploy.runtime.manifest import FileEntry, Manifest, read_manifest, to_document


@dataclass(frozen=True)
class Bundle:
    """A checked bundle."""

    path: Path
    manifest: Manifest

    def graph_path(self, role: str) -> Path:
        return self.path / self.manifest.graph(role)[0]

    def target_graph(self, layout: str, precision: str) -> tuple[Path, GraphSignature]:
        """File and signature of a target graph.

        Args:
            precision: what the graph is written in (see backends.graph_precision).

        Raises:
            SpotDeployError: the bundle was exported without it.
        """
        role = target_role(layout, precision)
        if role not in self.manifest.graphs:
            prefix, written = target_role(layout) + "-", sorted(self.manifest.graphs)
            raise SpotDeployError(
                "graph-missing",
                f"the bundle has no {precision} target graph, layout {layout}",
                seen=", ".join(["f32", *(r.removeprefix(prefix) for r in written if r.startswith(prefix))]),
                wanted=precision,
                fix=f"spot-deploy export CHECKPOINT -o BUNDLE --precisions {precision}",
            )
        return self.graph_path(role), self.manifest.graph(role)[1]


def bundle_id(document: Mapping[str, Any]) -> str:
    """Digest of what decides the output: files (path, size, sha256), decoding, named tokens, drafter defaults, graphs.

    Independent of time, and of engines added later.
    """
    parts = {name: document[name] for name in ("files", "decoding", "named_tokens", "speculation", "graphs")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def open_bundle(path: Path) -> Bundle:
    """Read the manifest and check every file's presence, size and sha256.

    Raises:
        SpotDeployError: the first thing that is wrong; nothing is written.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        check_file(path, entry)
    digest = bundle_id(to_document(manifest))
    if digest != manifest.bundle_id:
        raise SpotDeployError(
            "bundle-id",
            "the manifest has changed since it was written",
            seen=f"contents of {digest}",
            wanted=manifest.bundle_id,
            fix="export the bundle again",
        )
    return Bundle(path, manifest)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Raise unless the file is a regular file inside the bundle with the recorded size and digest."""
    path = folder / entry.path
    fix = "copy the bundle again, or export it again"
    if not path.is_file():
        raise SpotDeployError("bundle-file-missing", f"the bundle lacks {entry.path}", wanted=str(path), fix=fix)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SpotDeployError(
            "bundle-file-link", f"{entry.path} links out of the bundle", seen=str(path.resolve()), fix=fix
        )
    size = path.stat().st_size
    if size != entry.bytes:
        raise SpotDeployError(
            "bundle-file-size",
            f"{entry.path} has another size than when it was written",
            seen=f"{size} bytes",
            wanted=f"{entry.bytes} bytes",
            fix=fix,
        )
    digest = sha256(path)
    if digest != entry.sha256:
        raise SpotDeployError(
            "bundle-file-changed",
            f"{entry.path} has changed since it was written",
            seen=f"sha256 {digest}",
            wanted=f"sha256 {entry.sha256}",
            fix=fix,
        )
