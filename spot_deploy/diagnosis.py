"""What `doctor` finds: backends, versions, faults of bundles and engines, leftovers of interrupted runs."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spot_deploy.engines import backends, machine
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import STAGING, in_use
from spot_deploy.engines.record import open_record, record_path
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.runtime.manifest import is_bundle

PACKAGES = (
    "spot-deploy", "numpy", "tokenizers", "jinja2", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt-rtx",
    "tensorrt", "torch", "transformers", "onnx", "onnxscript",
)  # fmt: skip

# What its makers have seen of each backend; they had no GPU.
PROVEN = {
    "onnxruntime cpu": "decoding, in every test run",
    "onnxruntime cuda": "its checks, and its IO binding with the CPU in the place of the GPU",
    "onnxruntime tensorrt": "the same",
    "openvino": "decoding, in every test run (bf16: not)",
    "tensorrt-rtx": "building, in every test run; running, against doubles of CUDA and TensorRT alone",
    "tensorrt": "names and signatures of versions 10 and 11; running, against the same doubles",
}


def diagnose(bundles: Sequence[Path], *, clean: bool) -> dict[str, Any]:
    """The whole report; with `clean`, leftovers are deleted."""
    return {
        "machine": _machine(),
        "backends": list(_backends()),
        "packages": {name: _version(name) for name in PACKAGES},
        "bundles": [_bundle(path) for path in bundles],
        "leftovers": [_leftover(path, clean) for path in _leftovers(bundles)],
    }


def _machine() -> dict[str, str]:
    free = machine.memory_free()
    disk = machine.disk_free(Path.cwd())
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": backends.processor(),
        "threads": f"{backends.default_threads()} for this process",
        "memory": "unknown" if free is None else f"{free / 1e9:.1f} GB free",
        "disk": "unknown" if disk is None else f"{disk / 1e9:.1f} GB free here",
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[dict[str, Any]]:
    """Every backend and provider, and whether it builds and runs here; if not, the sentence that says why."""
    for name in backends.BACKENDS:
        try:
            backends.require(name)
            providers = backends.providers(name)
        except SpotDeployError as error:
            yield {"name": name, "builds": False, "runs": False, "why": _sentence(error), "proven": _proven(name)}
            continue
        for provider in providers:
            shown = name if len(providers) == 1 else f"{name} {provider}"
            try:
                backends.require_device(name, provider)
            except SpotDeployError as error:
                builds = backends.builds_without_device(name)
                why = _sentence(error)
                yield {"name": shown, "builds": builds, "runs": False, "why": why, "proven": _proven(shown)}
            else:
                why = f"precisions {', '.join(backends.precisions(name))}"
                yield {"name": shown, "builds": True, "runs": True, "why": why, "proven": _proven(shown)}


def _proven(name: str) -> str:
    """By its makers; `scripts/gpu-check` proves the rest on a machine that has it."""
    return PROVEN.get(name) or "; ".join(text for shown, text in PROVEN.items() if shown.split()[0] == name)


def _sentence(error: SpotDeployError) -> str:
    return "; ".join(part for part in (error.what, error.seen, f"fix: {error.fix}") if part)


def _bundle(path: Path) -> dict[str, Any]:
    engines: list[dict[str, str]] = []
    faults: list[str] = []
    try:
        bundle = open_bundle(path)
    except SpotDeployError as error:
        return {"path": str(path), "engines": [], "faults": [_sentence(error)]}
    for backend in backends.BACKENDS:
        if not record_path(path, backend).is_file():
            continue
        try:
            record = open_record(path, backend, bundle.manifest.bundle_id)
        except SpotDeployError as error:
            engines.append({"backend": backend, "text": _sentence(error)})
            if error.exit_code == 1:
                faults.append(f"engine {backend}: {error.what}; fix: {error.fix}")
        else:
            inputs = record.inputs
            exact = "strictly exact" if record.exact else "not bit-exact"
            text = f"runs here: {inputs.layout}, {inputs.precision}, {inputs.threads} threads, {exact}"
            engines.append({"backend": backend, "text": text})
    return {"path": str(path), "engines": engines, "faults": faults}


def _leftovers(bundles: Iterable[Path]) -> list[Path]:
    """Staging files and folders of runs that were killed."""
    here = Path.cwd()
    folders = {here.resolve()}
    for path in [*bundles, *(p for p in here.iterdir() if p.is_dir() and is_bundle(p))]:
        folders |= {path.resolve().parent, path.resolve(), (path / "engines").resolve()}
        folders |= {p.resolve() for p in (path / "engines").glob("*") if p.is_dir() and not p.name.startswith(STAGING)}
    return sorted(p for folder in folders if folder.is_dir() for p in folder.glob(f"{STAGING}*"))


def _leftover(path: Path, clean: bool) -> dict[str, Any]:
    size = sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    busy = in_use(path)
    if clean and not busy:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"path": str(path), "bytes": size, "deleted": clean and not busy, "in_use": busy}
