"""Opening a bundle: every file is there and is the one that was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_deploy.engines import backends
from spot_deploy.engines.contracts import Compiled, OrderSession, TargetSession, target_role
from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.engines.files import sha256
from spot_deploy.engines.profiles import spanning
from spot_deploy.engines.record import KERNELS, EngineInputs, EngineRecord, engine_folder
from spot_deploy.runtime.manifest import FileEntry, Manifest, read_manifest, to_document


@dataclass(frozen=True)
class Bundle:
    """A checked bundle."""

    path: Path
    manifest: Manifest

    def graph_path(self, role: str) -> Path:
        return self.path / self.manifest.graph(role)[0]

    def target_role(self, inputs: EngineInputs) -> str:
        """The role of the target graph that an engine opens.

        Raises:
            SpotDeployError: the bundle has no such graph (exit code 2).
        """
        needed = backends.graph_precision(inputs.backend, inputs.precision)
        role = target_role(inputs.layout, needed)
        if role not in self.manifest.graphs:
            raise usage_error(
                "graph-missing",
                f"the bundle has no target graph in {needed} with the layout {inputs.layout}",
                seen=", ".join(sorted(self.manifest.graphs)),
                wanted=role,
                fix=f"spot-deploy export ... --precisions {needed}, or another --precision or --layout",
            )
        return role

    def open_target(
        self, record: EngineRecord, *, threads: int | None = None, engines: Path | None = None
    ) -> TargetSession:
        """Open the target as an engine says.

        Args:
            threads: in place of the engine's.
            engines: folder of compiled engines, in place of the bundle's own.
        """
        role = self.target_role(record.inputs)
        return backends.open_target(record.inputs.backend, **self._opened(role, record, threads, engines))

    def open_order_model(
        self, record: EngineRecord, *, threads: int | None = None, engines: Path | None = None
    ) -> OrderSession:
        """Open the order model likewise."""
        return backends.open_order_model(record.inputs.backend, **self._opened("order", record, threads, engines))

    def _opened(self, role: str, record: EngineRecord, threads: int | None, engines: Path | None) -> dict[str, Any]:
        """What a backend opens: a compiled engine, or the ONNX file itself."""
        inputs, path = record.inputs, self.graph_path(role)
        options: dict[str, Any] = {
            "path": path,
            "signature": self.manifest.graph(role)[1],
            "threads": threads or inputs.threads,
            "precision": inputs.precision,
            "provider": inputs.provider,
        }
        if backends.compiles(inputs.backend):
            name, kernels = f"{role}.engine", f"{role}{KERNELS}"
            folder = engines or engine_folder(self.path, inputs.backend)
            options["path"] = folder / name
            options["compiled"] = Compiled(
                sha256=record.files[name]["sha256"],
                host_code="version" in inputs.portable,
                weights=path if inputs.strip else None,
                buffers=record.build["compiler"]["graphs"][role]["buffers"],
                kernels=(folder / kernels, record.files[kernels]["sha256"]) if kernels in record.files else None,
            )
        elif inputs.provider == "tensorrt":
            options["sizes"] = spanning(record.profiles)
        return options


def bundle_id(document: Mapping[str, Any]) -> str:
    """Digest of what decides the output: files (path, size, sha256), decoding, named tokens, drafter defaults, graphs.

    Independent of time, and of engines added later.
    """
    parts = {name: document[name] for name in ("files", "decoding", "named_tokens", "speculation", "graphs")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def open_bundle(path: Path, *, contents: bool = True) -> Bundle:
    """Read the manifest and check every file's presence, size and sha256.

    Args:
        contents: False leaves the sha256 out, for a bundle that was checked a moment ago.

    Raises:
        SpotDeployError: the first thing that is wrong; nothing is written.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        check_file(path, entry, contents=contents)
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


def check_file(folder: Path, entry: FileEntry, *, contents: bool = True) -> None:
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
    digest = sha256(path) if contents else entry.sha256
    if digest != entry.sha256:
        raise SpotDeployError(
            "bundle-file-changed",
            f"{entry.path} has changed since it was written",
            seen=f"sha256 {digest}",
            wanted=f"sha256 {entry.sha256}",
            fix=fix,
        )
