"""The engine record, `engines/BACKEND/engine.json`: what an engine was made from and for, and what was seen of it.

ONNX Runtime and OpenVINO open the ONNX file itself; their "engine" is this record. TensorRT's is a compiled file beside
it, which cannot be inspected without a GPU, so that the record has to tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spot_deploy.engines import backends
from spot_deploy.engines.contracts import GRAPH_PRECISIONS, LAYOUTS
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError
from spot_deploy.engines.files import read_json, sha256, write_json

FORMAT = "spot-deploy-engine"
SCHEMA_VERSION = 4
RECORD = "engine.json"
LAYERS = ".layers.json"  # after a role: what the compiled engine consists of
KERNELS = ".kernels"  # after a role: what the backend compiled for this GPU while the engine was proven


@dataclass(frozen=True)
class EngineInputs:
    """All that decides what an engine is; equal inputs need no new build.

    Attributes:
        bundle_id: digest of the bundle's files and settings.
        backend, provider: what runs it; `provider` is the part of the backend that executes.
        layout, precision, threads: how it is opened.
        budgets, requests: what its profiles cover.
        targets: compute capabilities that it is compiled for, such as sm89; empty on CPU.
        portable: ways in which a compiled engine is portable (see backends.PORTABLE).
        strip: whether it was compiled without weights, which come from the bundle when it is opened.
        versions: packages and processor, which together decide its last bits.
    """

    bundle_id: str
    backend: str
    provider: str
    layout: str
    precision: str
    threads: int
    budgets: tuple[int, ...]
    requests: int
    targets: tuple[str, ...]
    portable: tuple[str, ...]
    strip: bool
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        integers = (self.threads, self.requests, *self.budgets)
        checks = {
            f"layout {self.layout!r}": self.layout in LAYOUTS,
            f"precision {self.precision!r}": self.precision in GRAPH_PRECISIONS,
            f"backend {self.backend!r}": self.backend in backends.BACKENDS,
            f"threads, requests or budgets of {integers}": all(type(n) is int for n in integers)
            and 1 <= self.threads <= 1024
            and 1 <= self.requests <= 1024
            and list(self.budgets) == sorted(set(self.budgets))
            and self.budgets[:1] == (0,),
            f"versions {self.versions!r}": isinstance(self.versions, Mapping),
            f"targets {self.targets!r}": all(isinstance(target, str) for target in self.targets),
            f"portable {self.portable!r}": set(self.portable) <= set(backends.PORTABLE),
            f"strip {self.strip!r}": isinstance(self.strip, bool),
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("not possible: " + "; ".join(bad))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EngineInputs:
        """From JSON values; raises KeyError, TypeError or ValueError if they are not those of an engine."""
        values = {f.name: document[f.name] for f in fields(cls)}
        for name in ("budgets", "targets", "portable"):
            if type(values[name]) is not list:
                raise TypeError(f"{name} is {values[name]!r}")
            values[name] = tuple(values[name])
        return cls(**values)

    def changes(self, other: EngineInputs) -> list[str]:
        """What differs in `other`, a line each: `threads: 2 -> 4`."""
        lines = []
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(other, field.name)
            if field.name != "versions":
                lines += [f"{field.name}: {_shown(before)} -> {_shown(after)}"] if before != after else []
                continue
            for name in sorted({*before, *after}):
                if before.get(name) != after.get(name):
                    lines.append(f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}")
        return lines


def _shown(value: object) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)[:20]


@dataclass(frozen=True)
class EngineRecord:
    """An engine of a bundle.

    Attributes:
        inputs: what it was made from and for.
        profiles: shapes it serves (see `profiles.Profile`).
        probe: result of `probe.probe_invariance`; None where the engine cannot run on the machine that built it.
        smoke: result of replaying the bundle's golden traces; None likewise.
        audit: result of the exactness audit, for engines whose probe is not strict; else None.
        files: of the compiled engine, name to bytes and sha256; empty where the ONNX file itself is opened.
        build: seconds, peak memory, and what the compiler told.
        created_at: UTC.
    """

    inputs: EngineInputs
    profiles: Sequence[Mapping[str, Any]]
    probe: Mapping[str, Any] | None
    smoke: Mapping[str, Any] | None
    audit: Mapping[str, Any] | None
    files: Mapping[str, Mapping[str, Any]]
    build: Mapping[str, Any]
    created_at: str

    @property
    def exact(self) -> bool:
        """Whether the probe found every state bit-equal, whatever its batch mates."""
        return self.probe is not None and bool(self.probe["strict"])

    def why_unproven(self, threads: int) -> str:
        """Why speculation is not known to be strictly exact at any budget; empty where it is up to `exact_budget`."""
        if threads != self.inputs.threads:
            return f"the engine was probed with {self.inputs.threads} threads, not with {threads}"
        if self.exact:
            return ""
        audited = ""
        if self.audit is not None:
            audited = (
                f"; an audit of {self.audit['commits']} commits found {self.audit['near_ties']} near ties, no error"
            )
        return f"in this engine a state's last bits depend on its batch mates{audited}"

    def exact_budget(self, threads: int) -> int:
        """The largest budget for which speculation is known to be strictly exact; 0 is draft-free, the control."""
        assert self.probe is not None
        return self.probe["states"] - 1 if self.exact and threads == self.inputs.threads else 0


def engine_folder(bundle: Path, backend: str) -> Path:
    return bundle / "engines" / backend


def record_path(bundle: Path, backend: str) -> Path:
    return engine_folder(bundle, backend) / RECORD


def is_engine(folder: Path) -> bool:
    """Whether `build-engine` wrote a folder, in whatever version; a damaged record counts as one."""
    if not (folder / RECORD).is_file():
        return False
    try:
        document = read_json(folder / RECORD, code="engine-record", fix="")
    except SpotDeployError:
        return True
    return isinstance(document, dict) and document.get("format") == FORMAT


def write_record(folder: Path, record: EngineRecord) -> None:
    """Write the record into an engine folder, atomically."""
    write_json(folder / RECORD, {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(record)})


def build_command(bundle: Path, backend: str) -> str:
    return f"spot-deploy build-engine {shlex.quote(str(bundle))} --backend {backend}"


def same_build(bundle: Path, inputs: EngineInputs) -> str:
    """The command that builds with the same options."""
    parts = [build_command(bundle, inputs.backend), f"--provider {inputs.provider}", f"--layout {inputs.layout}"]
    parts += [f"--precision {inputs.precision}", f"--threads {inputs.threads}", f"--requests {inputs.requests}"]
    parts += [f"--budgets {','.join(map(str, inputs.budgets))}"]
    parts += [f"--target {target}" for target in inputs.targets] + [f"--portable {way}" for way in inputs.portable]
    return " ".join([*parts, *(["--strip"] if inputs.strip else [])])


def read_record(bundle: Path, backend: str) -> EngineRecord:
    """Read the record of a backend.

    Raises:
        SpotDeployError: there is none, or it is damaged.
    """
    path = record_path(bundle, backend)
    build = build_command(bundle, backend)
    if not path.is_file():
        raise SpotDeployError("engine-missing", f"{bundle} has no engine for {backend}", fix=build)
    document = read_json(path, code="engine-record", fix=f"{build} --force")
    try:
        if (document["format"], document["schema_version"]) != (FORMAT, SCHEMA_VERSION):
            raise ValueError(f"format {document['format']!r}, schema {document['schema_version']!r}")
        inputs = EngineInputs.from_dict(document["inputs"])
        others = {f.name: document[f.name] for f in fields(EngineRecord) if f.name != "inputs"}
        record = EngineRecord(inputs, **others)
        if inputs.backend != backend:
            raise ValueError(f"backend {inputs.backend!r}")
        _check_results(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpotDeployError(
            "engine-record", f"cannot use {path}", seen=repr(error)[:300], fix=f"{build} --force"
        ) from error
    return record


def _check_results(record: EngineRecord) -> None:
    numbers: list[Any] = [record.build["seconds"]]
    budgets = record.inputs.budgets
    if (record.probe is None) != (record.smoke is None) or (record.audit is not None and record.probe is None):
        raise ValueError("results contradict each other")
    if record.probe is None and not backends.compiles(record.inputs.backend):
        raise ValueError("an engine that runs where it is built has no probe")
    if record.probe is not None:
        if record.probe["strict"] is not (record.probe["unequal"] == 0):
            raise ValueError("strict contradicts the counts")
        if record.probe["states"] != max(2, 1 + budgets[-1]):
            raise ValueError(f"a probe of {record.probe['states']} states for budgets {budgets}")
        if budgets[1:] and (record.audit is None) is not record.probe["strict"]:
            raise ValueError("the audit contradicts the probe")
        numbers += [record.probe[name] for name in ("states", "comparisons", "unequal")]
        if type(record.probe["strict"]) is not bool:
            raise ValueError(f"strict is {record.probe['strict']!r}")
    if record.smoke is not None:
        numbers += [record.smoke[name] for name in ("traces", "commits")]
        if type(record.smoke["first_differences"]) is not list:
            raise ValueError("first_differences")
    if not all(type(n) in (int, float) and 0 <= n < 2**31 for n in numbers):
        raise ValueError(f"numbers {numbers}")
    for name, entry in record.files.items():
        if Path(name).name != name or type(entry["bytes"]) is not int or type(entry["sha256"]) is not str:
            raise ValueError(f"file {name!r}")


def damaged_files(folder: Path, record: EngineRecord) -> list[str]:
    """What is wrong with the compiled files of an engine, a line each: missing, another size, another content."""
    faults = []
    for name, entry in record.files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            faults.append(f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}")
        elif sha256(path) != entry["sha256"]:
            faults.append(f"{name} has changed")
    return faults


def open_record(bundle: Path, backend: str, bundle_id: str) -> EngineRecord:
    """The record of an engine that shall run here.

    Raises:
        SpotDeployError: as `read_record`; or it was made for another state of the bundle, with other versions or on
            another processor, or cannot run here at all (exit code 4).
    """
    backends.require(backend)
    if not record_path(bundle, backend).is_file():
        backends.require_device(backend, backends.providers(backend)[0])  # where it cannot run, building is no help
    record = read_record(bundle, backend)
    build = build_command(bundle, backend)
    if record.inputs.bundle_id != bundle_id:
        raise SpotDeployError(
            "engine-stale",
            "the engine was built for another state of the bundle",
            seen=record.inputs.bundle_id,
            wanted=bundle_id,
            fix=build,
        )
    if faults := damaged_files(engine_folder(bundle, backend), record):
        raise SpotDeployError(
            "engine-damaged", f"the engine for {backend} is damaged", seen="; ".join(faults), fix=build
        )
    inputs = record.inputs
    if inputs.provider not in backends.providers(backend) or inputs.precision not in backends.precisions(backend):
        raise SpotDeployError(
            "engine-elsewhere",
            f"{backend} cannot run this engine here",
            seen=f"provider {inputs.provider}, precision {inputs.precision}",
            wanted=f"one of {', '.join(backends.providers(backend))}; one of {', '.join(backends.precisions(backend))}",
            fix=build,
            exit_code=ENVIRONMENT,
        )
    backends.require_device(backend, inputs.provider, inputs.targets)
    if record.probe is None:
        raise SpotDeployError(
            "engine-unproven",
            "the engine was built on a machine that could not run it, so nothing is known of its exactness",
            fix=same_build(bundle, record.inputs) + "  (proves the engine that is there, and compiles nothing)",
            exit_code=ENVIRONMENT,
        )
    installed = backends.versions(backend, inputs.provider)
    if dict(record.inputs.versions) != installed:
        raise SpotDeployError(
            "engine-elsewhere",
            "the engine was built with other versions or on another processor, so its probe says nothing here",
            seen=str(installed),
            wanted=str(dict(record.inputs.versions)),
            fix=same_build(bundle, record.inputs),
            exit_code=ENVIRONMENT,
        )
    return record
