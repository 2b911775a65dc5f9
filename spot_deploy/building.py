"""`build-engine`: from a checked bundle to an engine that is known to work here, or that says it is not known.

An engine is built in a staging folder, proven there, and only then takes the place of the one before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spot_deploy import verification
from spot_deploy.child import run_in_child
from spot_deploy.engines import backends
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import staged_folder
from spot_deploy.engines.machine import Estimate, estimate, peak_memory
from spot_deploy.engines.profiles import Limits, Profile, target_profiles
from spot_deploy.engines.record import (
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
    """

    backend: str = "onnxruntime"
    provider: str | None = None
    layout: str | None = None
    precision: str | None = None
    threads: int | None = None
    budgets: tuple[int, ...] | None = None
    requests: int = 1
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What `build-engine` would do.

    Attributes:
        changes: what differs from the engine that is there; None: there is none that can be read.
        last_seconds: how long the last build of this backend took here.
    """

    bundle: Bundle
    inputs: EngineInputs
    profiles: tuple[Profile, ...]
    estimate: Estimate
    changes: list[str] | None
    last_seconds: float | None

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
    bundle = open_bundle(path)
    inputs = EngineInputs(
        bundle_id=bundle.manifest.bundle_id,
        backend=backend,
        provider=backends.choose_provider(backend, options.provider),
        layout=options.layout or backends.default_layout(backend),
        precision=backends.choose_precision(backend, options.precision),
        threads=1 if backends.compiles(backend) else options.threads or backends.default_threads(),
        budgets=_budgets(bundle.manifest, options.budgets),
        requests=options.requests,
        targets=backends.choose_targets(backend, options.targets),
        versions=backends.versions(backend),
    )
    bundle.target_role(inputs)
    limits = engine_limits(bundle.manifest, inputs)
    profiles = tuple(target_profiles(limits))
    changes: list[str] | None = None
    last = None
    if record_path(path, backend).is_file():
        with contextlib.suppress(SpotDeployError):  # damaged or of an older version: what is built now replaces it
            record = read_record(path, backend)
            changes, last = record.inputs.changes(inputs), record.build["seconds"]
            changes += damaged_files(engine_folder(path, backend), record)
            if not changes and json.dumps(record.profiles) != json.dumps([asdict(profile) for profile in profiles]):
                changes.append("profiles: others than this version makes")
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
    )


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
                arguments = {"path": str(path), "stage": str(stage), "inputs": asdict(plan.inputs)}
                run_in_child("spot_deploy.building:make_in_child", arguments, say)
            else:
                make_engine(plan.bundle, stage, plan.inputs, say)
    except BaseException:
        if not parent_was_there:
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        raise
    return read_record(path, backend), True


def make_in_child(path: str, stage: str, inputs: dict[str, Any], *, say: Say) -> None:
    """`make_engine` with arguments that pass through JSON. The parent has checked the bundle's contents."""
    make_engine(open_bundle(Path(path), contents=False), Path(stage), EngineInputs.from_dict(inputs), say)


def make_engine(bundle: Bundle, stage: Path, inputs: EngineInputs, say: Say) -> None:
    """Build and prove an engine in the folder `stage`.

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
        record = _compile(bundle, record, inputs, stage, say)
        if _runs_here(inputs, say):
            record = _prove(bundle, record, inputs, say, engines=stage)
    else:
        record = _prove(bundle, record, inputs, say)
    seconds = round(time.monotonic() - began, 3)
    write_record(stage, replace(record, build=dict(record.build) | {"seconds": seconds, "peak_memory": peak_memory()}))


def _compile(bundle: Bundle, record: EngineRecord, inputs: EngineInputs, stage: Path, say: Say) -> EngineRecord:
    """Compiled engine files of the target and the order model; nothing is proven of them here."""
    manifest = bundle.manifest
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
    session = bundle.open_target(inputs, engines=engines)
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
    return replace(record, smoke=smoke, audit=found)
