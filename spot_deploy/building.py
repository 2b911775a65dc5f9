"""`build-engine`: from a checked bundle to an engine record that is known to work here."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

from spot_deploy.engines import backends
from spot_deploy.engines.contracts import TargetSession
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError
from spot_deploy.engines.files import read_json
from spot_deploy.engines.probe import probe_invariance
from spot_deploy.engines.record import EngineRecord, read_record, record_path, write_record
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.bundle import Bundle, open_bundle
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.text import GOLDEN


def build_engine(
    path: Path,
    *,
    backend: str,
    layout: str = "split",
    precision: str | None = None,
    threads: int | None = None,
    force: bool = False,
) -> tuple[EngineRecord, bool]:
    """Build, probe and smoke-test an engine, then write its record.

    Args:
        path: the bundle.
        layout: attention layout, `split` (strict) or `packed`.
        precision: `f32` or `bf16`; None takes the backend's default on this processor.
        threads: None takes the cores that this process may use.
        force: build even if the record there is up to date.

    Returns:
        The record, and whether it was built now (False: it was up to date).

    Raises:
        SpotDeployError: the bundle is damaged, the backend cannot run, or a golden trace comes out differently
            (exit code 3, nothing is written).
    """
    precision = backends.choose_precision(backend, precision)
    bundle = open_bundle(path)
    threads = threads or backends.default_threads()
    if not force and record_path(path, backend).is_file():
        try:
            record = read_record(path, backend, bundle.manifest.bundle_id)
            if (record.layout, record.precision, record.threads) == (layout, precision, threads):
                return record, False
        except SpotDeployError:
            pass  # stale or damaged: what is built now replaces it
    manifest = bundle.manifest
    decoding = manifest.decoding
    role = f"target-{layout}"
    session = backends.open_target(
        backend, bundle.graph_path(role), manifest.graph(role)[1], threads=threads, precision=precision
    )
    probe = probe_invariance(
        session,
        decoding.shape,
        decoding.block_width,
        decoding.buckets,
        1 + max(manifest.speculation.budgets),
    )
    record = EngineRecord(
        backend=backend,
        layout=layout,
        precision=precision,
        threads=threads,
        bundle_id=manifest.bundle_id,
        providers=backends.providers(backend),
        versions=backends.versions(backend),
        probe=probe,
        smoke={},
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    record = replace(record, smoke=smoke_test(bundle, record, session))
    write_record(path, record)
    return record, True


def smoke_test(bundle: Bundle, record: EngineRecord, session: TargetSession) -> dict[str, Any]:
    """Replay the golden commit traces, draft-free.

    In float32 every commit must be equal. In bfloat16 the engine computes something else by design, so the first
    difference of each trace is recorded only.

    Raises:
        SpotDeployError: a commit differs in float32 (exit code 3).
    """
    golden = read_json(bundle.path / GOLDEN, code="golden", fix="export the bundle again")
    commits, differences = 0, []
    with Runtime.from_bundle(bundle, record, target=session) as runtime:
        for trace in golden["traces"]:
            seen: list[list[int]] = []

            def observe(state: State, head: Head, commit: Commit, seen: list[list[int]] = seen) -> None:
                seen.append([state.block, commit.position, commit.token])

            options = {key: trace[key] for key in ("temperature", "seed", "max_new_tokens")}
            runtime.generate(trace["prompt"], budget=0, ignore_eos=True, observe=observe, **options)
            wanted = [*trace["commits"], *([None] * (len(seen) - len(trace["commits"])))]
            first = next((index for index, commit in enumerate(seen) if commit != wanted[index]), None)
            differences.append(first)
            if first is not None and record.precision == "f32":
                raise SpotDeployError(
                    "golden-trace",
                    f"commit {first} of a golden trace differs on {record.backend}",
                    seen=f"block, position, token = {seen[first]}",
                    wanted=str(wanted[first]),
                    fix="report this: the backend computes something else than the checkpoint",
                    exit_code=VERIFICATION,
                )
            commits += len(seen)
    return {"traces": len(golden["traces"]), "commits": commits, "first_differences": differences}
