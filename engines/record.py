"""The engine record, `engines/BACKEND/engine.json`: what was built for one backend and machine, and what was seen.

ONNX Runtime needs no build of its own; its "engine" is this record: layout, threads, versions, and the result of the
invariance probe that decides whether speculation is strictly exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spot_deploy.engines import backends
from spot_deploy.engines.contracts import LAYOUTS
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError
from spot_deploy.engines.files import read_json, write_json

FORMAT = "spot-deploy-engine"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class EngineRecord:
    """An engine of a bundle.

    Attributes:
        backend, layout, precision, threads: how the session is opened.
        bundle_id: the bundle it was built for.
        providers: what executes inside the backend.
        versions: packages and processor at build time (see `backends.versions`).
        probe: result of `probe.probe_invariance`.
        smoke: result of replaying the bundle's golden traces.
        created_at: UTC.
    """

    backend: str
    layout: str
    precision: str
    threads: int
    bundle_id: str
    providers: Sequence[str]
    versions: Mapping[str, str]
    probe: Mapping[str, Any]
    smoke: Mapping[str, Any]
    created_at: str

    @property
    def exact(self) -> bool:
        """Whether the probe found every state bit-equal, whatever its batch mates."""
        return bool(self.probe["strict"])

    def exact_budget(self, threads: int) -> int:
        """The largest budget for which speculation is known to be strictly exact; 0 is draft-free, the control."""
        return self.probe["states"] - 1 if self.exact and threads == self.threads else 0


def record_path(bundle: Path, backend: str) -> Path:
    return bundle / "engines" / backend / "engine.json"


def write_record(bundle: Path, record: EngineRecord) -> Path:
    """Write the record atomically; returns its path."""
    path = record_path(bundle, record.backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(record)})
    return path


def read_record(bundle: Path, backend: str, bundle_id: str, *, here: bool = True) -> EngineRecord:
    """Read the record of a backend and check that it belongs to this bundle and, if it shall run `here`, this machine.

    Raises:
        SpotDeployError: there is none, it is damaged or of another bundle, or it was made with other versions.
    """
    path = record_path(bundle, backend)
    build = f"spot-deploy build-engine {bundle} --backend {backend} --force"
    if not path.is_file():
        raise SpotDeployError(
            "engine-missing",
            f"{bundle} has no engine for {backend}",
            fix=build.removesuffix(" --force"),
        )
    document = read_json(path, code="engine-record", fix=build)
    try:
        if (document["format"], document["schema_version"]) != (FORMAT, SCHEMA_VERSION):
            raise ValueError(f"format {document['format']!r}, schema {document['schema_version']!r}")
        record = EngineRecord(**{f.name: document[f.name] for f in fields(EngineRecord)})
        numbers = [record.threads, *(record.probe[name] for name in ("states", "comparisons", "unequal"))]
        numbers += [record.smoke[name] for name in ("traces", "commits")]
        right = all(type(n) is int and 0 <= n < 2**31 for n in numbers) and 1 <= record.threads <= 1024
        right &= all(isinstance(x, dict) for x in (record.versions, record.probe, record.smoke))
        right &= type(record.smoke["first_differences"]) is list and type(record.probe["strict"]) is bool
        right &= record.backend == backend and record.layout in LAYOUTS and record.precision in backends.PRECISIONS
        if not right:
            raise ValueError("a field has a value that is not possible")
    except (KeyError, TypeError, ValueError) as error:
        raise SpotDeployError("engine-record", f"cannot use {path}", seen=repr(error), fix=build) from error
    if record.bundle_id != bundle_id:
        raise SpotDeployError(
            "engine-stale",
            "the engine was built for another state of the bundle",
            seen=record.bundle_id,
            wanted=bundle_id,
            fix=build,
        )
    installed = backends.versions(backend) if here else record.versions
    if record.versions != installed:
        raise SpotDeployError(
            "engine-elsewhere",
            "the engine was built with other versions or on another processor, so its probe says nothing here",
            seen=str(installed),
            wanted=str(dict(record.versions)),
            fix=build,
            exit_code=ENVIRONMENT,
        )
    return record
