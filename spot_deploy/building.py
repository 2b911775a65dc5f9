"""`build-engine`: from a checked bundle to an engine that is known to work here, or that says it is not known.

An engine is built in a staging folder, proven there, and only then takes the place of the one before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spot_deploy import verification
from spot_deploy.child import run_in_child
from spot_deploy.engines import backends
from spot_deploy.engines.contracts import OrderSession, TargetSession
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError
from spot_deploy.engines.files import sha256, staged_folder, write_json
from spot_deploy.engines.inspector import summary, wrong_precision
from spot_deploy.engines.machine import Estimate, estimate, peak_memory
from spot_deploy.engines.profiles import Limits, Profile, target_profiles
from spot_deploy.engines.record import (
    KERNELS,
    LAYERS,
    EngineInputs,
    EngineRecord,
    damaged_files,
    engine_folder,
    is_engine,
    read_record,
    record_path,
    write_record,
)
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.bundle import Bundle, open_bundle
from spot_deploy.runtime.manifest import Manifest

Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildOptions:
    """What to build; `None` takes the backend's default on this machine.

    Attributes:
        budgets: draft budgets to serve, from 0; None takes the bundle's.
        requests: requests in one pass at most.
        targets: compute capabilities to compile for (TensorRT-RTX), such as sm89.
        portable: ways in which a compiled engine shall be portable (TensorRT; see backends.PORTABLE).
        strip: compile without weights, which then come from the bundle when the engine is opened.
    """

    backend: str = "onnxruntime"
    provider: str | None = None
    layout: str | None = None
    precision: str | None = None
    threads: int | None = None
    budgets: tuple[int, ...] | None = None
    requests: int = 1
    targets: tuple[str, ...] = ()
    portable: tuple[str, ...] = ()
    strip: bool = False


@dataclass(frozen=True)
class Plan:
    """What `build-engine` would do.

    Attributes:
        changes: what differs from the engine that is there; None: there is none that can be read.
        last_seconds: how long the last build of this backend took here.
        reuse: the compiled engine that is there stays, and is only proven.
        replaces: the inputs of an engine of another layout or precision that is there.
    """

    bundle: Bundle
    inputs: EngineInputs
    profiles: tuple[Profile, ...]
    estimate: Estimate
    changes: list[str] | None
    last_seconds: float | None
    reuse: bool = False
    replaces: EngineInputs | None = None

    @property
    def up_to_date(self) -> bool:
        return self.changes == []


def plan_build(path: Path, options: BuildOptions) -> Plan:
    """Check the bundle and the options, and work out the build. Opens no session and writes nothing.

    Raises:
        SpotDeployError: the bundle is damaged or lacks the graph, or the backend is not installed or cannot do it.
    """
    backend = options.backend
    backends.require(backend)
    backends.choose_portability(backend, options.portable, options.strip)
    bundle = open_bundle(path)
    provider = backends.choose_provider(backend, options.provider)
    inputs = EngineInputs(
        bundle_id=bundle.manifest.bundle_id,
        backend=backend,
        provider=provider,
        layout=options.layout or backends.default_layout(backend),
        precision=backends.choose_precision(backend, options.precision),
        threads=1 if backends.compiles(backend) else options.threads or backends.default_threads(),
        budgets=_budgets(bundle.manifest, options.budgets),
        requests=options.requests,
        targets=backends.choose_targets(backend, options.targets),
        portable=tuple(way for way in backends.PORTABLE if way in options.portable),
        strip=options.strip,
        versions=backends.versions(backend, provider),
    )
    bundle.target_role(inputs)
    limits = engine_limits(bundle.manifest, inputs)
    profiles = tuple(target_profiles(limits))
    changes: list[str] | None = None
    last = None
    reuse = False
    replaces: EngineInputs | None = None
    if record_path(path, backend).is_file():
        with contextlib.suppress(SpotDeployError):  # damaged or of an older version: what is built now replaces it
            record = read_record(path, backend)
            kept = backends.compiles(backend) and _proven_elsewhere(record, inputs)
            changes, last = [] if kept else record.inputs.changes(inputs), record.build["seconds"]
            if (record.inputs.layout, record.inputs.precision) != (inputs.layout, inputs.precision):
                replaces = record.inputs
            faults = damaged_files(engine_folder(path, backend), record)
            if not changes and json.dumps(record.profiles) != json.dumps([asdict(profile) for profile in profiles]):
                faults.append("profiles: others than this version makes")
            reuse = backends.compiles(backend) and not faults and _could_be_proven(record, inputs)
            changes += faults + ["proof: none by what is installed here; the engine itself stays"] * reuse
    return Plan(
        bundle,
        inputs,
        profiles,
        estimate(
            path,
            path / "weights.safetensors",
            bundle.manifest.decoding.shape,
            profiles,
            base_memory=backends.base_memory(backend),
            base_disk=backends.base_disk(backend),
            artefact_bytes_per_weight=backends.artefact_bytes_per_weight(backend, inputs.precision),
        ),
        changes,
        last,
        reuse,
        replaces,
    )


DEVICE_VERSIONS = ("gpu", "driver")


def _device_here(inputs: EngineInputs) -> bool:
    with contextlib.suppress(SpotDeployError):
        backends.require_device(inputs.backend, inputs.provider, inputs.targets)
        return True
    return False


def _could_be_proven(record: EngineRecord, inputs: EngineInputs) -> bool:
    """Whether the compiled engine that is there is the one that is wanted, and lacks a proof that can be had here.

    So it is with one that was compiled where it cannot run, and with one that is portable to a later version.
    """
    there = record.inputs
    fixed = set() if "version" in there.portable else {there.backend}
    if not there.targets and not _fits(there.portable, there.versions.get("gpu"), inputs.versions.get("gpu")):
        return False
    versions = dict(inputs.versions) | {name: v for name, v in there.versions.items() if name in fixed}
    if replace(there, versions=versions) != inputs or (record.probe is not None and there == inputs):
        return False
    return _device_here(inputs)


def _fits(portable: tuple[str, ...], built: str | None, here: str | None) -> bool:
    """Whether an engine for one GPU, named as in versions, with its compute capability last, may run on another."""
    if built is None or here is None or built == here:
        return built == here
    before, now = (int(name.rpartition(" sm")[2]) for name in (built, here))
    if "ampere-plus" in portable:
        return now >= 80
    return "same-sm" in portable and before == now


def _proven_elsewhere(record: EngineRecord, inputs: EngineInputs) -> bool:
    """Whether a machine without a GPU looks at the engine that is wanted, proven on a machine that has one."""
    device = {name: v for name, v in record.inputs.versions.items() if name in DEVICE_VERSIONS}
    same = replace(inputs, versions=dict(inputs.versions) | device) == record.inputs
    return record.probe is not None and same and bool(device) and not _device_here(inputs)


def _budgets(manifest: Manifest, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    if wanted is None:
        return manifest.speculation.budgets
    return tuple(sorted({0, *wanted}))


def engine_limits(manifest: Manifest, inputs: EngineInputs) -> Limits:
    """What an engine with these inputs shall serve."""
    decoding, budgets = manifest.decoding, inputs.budgets
    return Limits(
        block_width=decoding.block_width,
        buckets=decoding.buckets,
        budgets=budgets,
        budget=max(b for b in budgets if b <= manifest.speculation.budget),
        requests=inputs.requests,
        prefill_positions=decoding.prefill_positions,
        window=decoding.window,
        whole=0 if decoding.exact_cache else decoding.max_positions,
    )


def build_engine(
    path: Path,
    options: BuildOptions | None = None,
    *,
    force: bool = False,
    check_limits: bool = True,
    in_child: bool = False,
    say: Say = lambda _: None,
    **changes: Any,
) -> tuple[EngineRecord, bool]:
    """Build an engine, prove what can be proven of it here, and publish it.

    Args:
        path: the bundle.
        options: what to build; `changes` are fields of BuildOptions set on top.
        force: build even if the engine there is up to date.
        check_limits: refuse if memory or disk is expected to run out.
        in_child: work in another process, which Ctrl-C ends at once.
        say: told what is being done.

    Returns:
        The record, and whether it was built now (False: it was up to date).

    Raises:
        SpotDeployError: the bundle is damaged, the backend cannot, or a gate failed (exit code 3). The engine that was
            there stays.
    """
    plan = plan_build(path, replace(options or BuildOptions(), **changes))
    return build_planned(plan, force=force, check_limits=check_limits, in_child=in_child, say=say)


def build_planned(
    plan: Plan, *, force: bool, check_limits: bool, in_child: bool, say: Say
) -> tuple[EngineRecord, bool]:
    """`build_engine` from a plan that was made a moment ago."""
    path, backend = plan.bundle.path, plan.inputs.backend
    if plan.up_to_date and not force:
        return read_record(path, backend), False
    if check_limits:
        plan.estimate.require()
    folder = engine_folder(path, backend)
    parent_was_there = folder.parent.is_dir()
    folder.parent.mkdir(exist_ok=True)
    try:
        with staged_folder(folder, force=True, ours=is_engine) as stage:
            if in_child:
                arguments = {
                    "path": str(path), "stage": str(stage), "inputs": asdict(plan.inputs),
                    "reuse": plan.reuse and not force,
                }  # fmt: skip
                run_in_child("spot_deploy.building:make_in_child", arguments, say)
            else:
                make_engine(plan.bundle, stage, plan.inputs, say, reuse=plan.reuse and not force)
    except BaseException:
        if not parent_was_there:
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        raise
    return read_record(path, backend), True


def make_in_child(path: str, stage: str, inputs: dict[str, Any], reuse: bool, *, say: Say) -> None:
    """`make_engine` with arguments that pass through JSON. The parent has checked the bundle's contents."""
    bundle = open_bundle(Path(path), contents=False)
    make_engine(bundle, Path(stage), EngineInputs.from_dict(inputs), say, reuse=reuse)


def make_engine(bundle: Bundle, stage: Path, inputs: EngineInputs, say: Say, *, reuse: bool = False) -> None:
    """Build and prove an engine in the folder `stage`.

    Args:
        reuse: take the compiled files of the engine that is there.

    Raises:
        SpotDeployError: the backend refuses the graph, or a gate failed (exit code 3).
    """
    began = time.monotonic()
    profiles = target_profiles(engine_limits(bundle.manifest, inputs))
    record = EngineRecord(
        inputs=inputs,
        profiles=[asdict(profile) for profile in profiles],
        probe=None,
        smoke=None,
        audit=None,
        files={},
        build={"seconds": 0.0},
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    if backends.compiles(inputs.backend):
        make = _take_compiled if reuse else _compile
        record = make(bundle, record, stage, say)
        if reuse or _runs_here(inputs, say):
            record = _prove(bundle, record, inputs, say, engines=stage)
    else:
        record = _prove(bundle, record, inputs, say)
    seconds = round(time.monotonic() - began, 3)
    write_record(stage, replace(record, build=dict(record.build) | {"seconds": seconds, "peak_memory": peak_memory()}))


def _take_compiled(bundle: Bundle, record: EngineRecord, stage: Path, say: Say) -> EngineRecord:
    """The compiled files of the engine that is there, in the staging folder too."""
    backend = record.inputs.backend
    before = read_record(bundle.path, backend)
    say("taking the compiled engine that is there")
    files = {name: entry for name, entry in before.files.items() if not name.endswith(KERNELS)}
    for name in files:
        source = engine_folder(bundle.path, backend) / name
        try:
            os.link(source, stage / name)
        except OSError:  # a file system without links
            shutil.copy2(source, stage / name)
    return replace(record, files=files, build={"seconds": 0.0, "compiler": before.build["compiler"]})


def _compile(bundle: Bundle, record: EngineRecord, stage: Path, say: Say) -> EngineRecord:
    """Compiled engine files of the target and the order model; nothing is proven of them here."""
    manifest, inputs = bundle.manifest, record.inputs
    limits = engine_limits(manifest, inputs)
    role = bundle.target_role(inputs)
    order = manifest.graph("order")[1] if manifest.speculation.order_model else None
    facts = backends.compile_engine(
        inputs.backend,
        target=(role, bundle.graph_path(role), manifest.graph(role)[1]),
        order=None if order is None else (bundle.graph_path("order"), order),
        shape=manifest.decoding.shape,
        limits=limits,
        folder=stage,
        capabilities=inputs.targets,
        portable=inputs.portable,
        strip=inputs.strip,
        timing_caches=timing_caches(),
        say=say,
        warn=lambda text: say(f"warning: {text}"),
    )
    files = {g["engine"]: {"bytes": g["bytes"], "sha256": g["sha256"]} for g in facts["graphs"].values()}
    return replace(record, files=files, build={"seconds": 0.0, "compiler": facts})


def timing_caches() -> Path:
    """Where compilers keep what they measured: SPOT_DEPLOY_CACHE, else spot-deploy in the user's cache folder."""
    if own := os.environ.get("SPOT_DEPLOY_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spot-deploy"


def _runs_here(inputs: EngineInputs, say: Say) -> bool:
    """Whether a compiled engine can run on the machine that compiled it; if not, `say` is told why."""
    try:
        backends.require_device(inputs.backend, inputs.provider, inputs.targets)
    except SpotDeployError as error:
        if not backends.builds_without_device(inputs.backend):
            raise
        say(f"nothing can be proven here: {error.what}")
        return False
    return True


def _prove(
    bundle: Bundle, record: EngineRecord, inputs: EngineInputs, say: Say, engines: Path | None = None
) -> EngineRecord:
    """The gates that a build must pass, on an engine that can run here.

    Args:
        engines: folder of compiled engines that are not published yet.
    """
    backend, precision = inputs.backend, inputs.precision
    say(f"opening {bundle.target_role(inputs)}")
    session = bundle.open_target(record, engines=engines)
    if engines is not None:
        record = replace(record, build=dict(record.build) | {"layers": _layers(bundle, session, inputs, engines)})
    close, _ = (verification.require(g, backend) for g in verification.elementwise(bundle, session, precision))
    say("comparing states alone and among others")
    probe = verification.invariance(bundle, session, inputs.budgets, inputs.requests)
    for gate in verification.invariance_gates(probe, precision, close.figures["allowed"]):
        verification.require(gate, backend)
    record = replace(record, probe=probe)
    with Runtime.from_bundle(bundle, record, target=session, engines=engines) as runtime:
        say("replaying golden traces")
        traces = verification.commit_traces(runtime, session, bundle, precision, close.figures["allowed"])
        smoke = verification.require(traces, backend).figures
        found = None
        if not probe["strict"] and inputs.budgets[1:]:
            say("auditing drafted decoding")
            gate = verification.speculative_equality(runtime, session, bundle, inputs.budgets, probe)
            found = verification.require(gate, backend).figures
        record = replace(record, smoke=smoke, audit=found)
        if engines is not None:
            sessions = {bundle.target_role(inputs): session, "order": runtime.order_model}
            record = replace(record, files={**record.files, **_keep_kernels(backend, sessions, engines)})
    return record


def _keep_kernels(
    backend: str, sessions: Mapping[str, TargetSession | OrderSession | None], stage: Path
) -> dict[str, Any]:
    """Write what the backend compiled while the engines were proven beside them; entries for the record."""
    files = {}
    for role, session in sessions.items():
        kernels = None if session is None else backends.compiled_kernels(backend, session)
        if kernels:  # an empty file could not be mapped
            path = stage / f"{role}{KERNELS}"
            path.write_bytes(kernels)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return files


def _layers(bundle: Bundle, session: TargetSession, inputs: EngineInputs, stage: Path) -> dict[str, Any]:
    """Write what the compiled target consists of beside it, and check that it computes in its graph's precision.

    Raises:
        SpotDeployError: it computes in another (exit code 3).
    """
    role = bundle.target_role(inputs)
    try:
        layers = backends.engine_layers(inputs.backend, session)
    except SpotDeployError as error:  # an account that nobody has seen yet proves nothing against the engine
        return {role: {"untold": f"{error.what}: {error.seen}"}}
    write_json(stage / f"{role}{LAYERS}", [asdict(layer) for layer in layers])
    wrong = wrong_precision(layers, inputs.precision)
    if wrong is not None:
        raise SpotDeployError(
            "engine-precision",
            f"the {inputs.backend} engine does not compute in {inputs.precision}",
            seen=wrong,
            wanted=f"what the graph {role} is written in",
            fix="choose the --precision that it does compute in; if the graph is right, report this with your versions",
            exit_code=VERIFICATION,
        )
    return {role: summary(layers)}
