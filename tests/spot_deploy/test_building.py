"""build-engine: what decides a build, what it refuses, and that it leaves nothing half-done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_deploy import Runtime, SpotDeployError, build_engine, building
from spot_deploy.building import BuildOptions, plan_build
from spot_deploy.child import run_in_child
from spot_deploy.diagnosis import diagnose
from spot_deploy.engines import backends, cuda, machine, ort
from spot_deploy.engines.contracts import TargetShape
from spot_deploy.engines.files import STAGING
from spot_deploy.engines.machine import Estimate
from spot_deploy.engines.prefix import HostSession
from spot_deploy.engines.profiles import Limits, order_profile, target_profiles
from spot_deploy.engines.record import EngineInputs, read_record, record_path
from spot_deploy.runtime.bundle import open_bundle

INPUTS = EngineInputs(
    "b" * 64, "onnxruntime", "cpu", "split", "f32", 1, (0, 3, 8), 1, (), (), False, {"onnxruntime": "1"}
)


def command(*arguments):
    return [sys.executable, "-P", "-c", "from spot_deploy.cli.main import main; main()", *map(str, arguments)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bundle_id", "c" * 64),
        ("provider", "cuda"),
        ("layout", "packed"),
        ("precision", "bf16"),
        ("threads", 2),
        ("budgets", (0, 3)),
        ("requests", 4),
        ("targets", ("sm89",)),
        ("versions", {"onnxruntime": "2"}),
    ],
)
def test_every_input_is_seen_to_change(name, value):
    changed = replace(INPUTS, **{name: value})
    (line,) = INPUTS.changes(changed)
    assert "->" in line
    assert INPUTS.changes(INPUTS) == []


def test_inputs_survive_json():
    assert EngineInputs.from_dict(json.loads(json.dumps(asdict(INPUTS)))) == INPUTS


def test_plan_says_what_would_be_built(tiny_bundle):
    plan = plan_build(tiny_bundle, BuildOptions(precision="f32", threads=1))
    assert plan.up_to_date
    assert plan.inputs.budgets == (0, 3, 8)
    plan = plan_build(tiny_bundle, BuildOptions(precision="f32", threads=2, budgets=(3,)))
    assert plan.changes == ["threads: 1 -> 2", "budgets: 0,3,8 -> 0,3"]
    assert plan.last_seconds > 0
    assert plan.estimate.memory > 100 << 20


def test_fewer_budgets_are_probed_and_recorded(tiny_copy):
    record, _ = build_engine(tiny_copy, threads=1, budgets=(3,))
    assert record.inputs.budgets == (0, 3)
    assert record.exact_budget(1) == record.probe["states"] - 1 == 3
    assert max(p["symbols"]["S"][2] for p in record.profiles) == 4


def test_several_requests_are_probed(tiny_copy):
    record, _ = build_engine(tiny_copy, threads=1, requests=3)
    assert record.exact
    assert record.probe["requests"] == 3
    assert record.probe["comparisons"] > read_comparisons(tiny_copy, requests=1)


def read_comparisons(bundle, requests):
    record, _ = build_engine(bundle, threads=1, requests=requests)
    return record.probe["comparisons"]


def test_missing_graph_and_useless_options(tiny_bundle):
    for options in ({"precision": "int4"}, {"precision": "f16"}, {"targets": ("sm89",)}, {"provider": "abacus"}):
        with pytest.raises(SpotDeployError) as caught:
            plan_build(tiny_bundle, BuildOptions(threads=1, **options))
        assert caught.value.exit_code in (2, 4)
        assert caught.value.fix


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_gpu_providers_are_refused_without_a_gpu(tiny_bundle, provider, monkeypatch):
    """Three machines: a package without the provider; no driver; a driver, but the wrong TensorRT."""
    import gpu_double  # not at the top: a child process imports this file without the folder of doubles
    import onnxruntime

    with pytest.raises(SpotDeployError, match=provider) as caught:
        build_engine(tiny_bundle, provider=provider, force=True)
    assert caught.value.exit_code == 4
    assert "onnxruntime-gpu" in caught.value.wanted
    everything = list(ort.PROVIDERS.values())
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: everything)
    with pytest.raises(SpotDeployError) as caught:
        ort.require_device(provider)
    assert "driver" in caught.value.wanted
    monkeypatch.setattr(cuda, "missing_driver", lambda: None)
    monkeypatch.setattr(cuda, "_runtime", gpu_double.CudaRuntime)
    monkeypatch.setattr(ort, "_loads", lambda library: library == "libnvinfer.so.11")
    if provider == "tensorrt":
        with pytest.raises(SpotDeployError) as caught:
            ort.require_device(provider)
        assert "libnvinfer.so.10" in caught.value.seen
        assert "libnvinfer.so.11 is there" in caught.value.seen
    # The package says it can, and then takes the CPU: that is an error, not a slow run.
    monkeypatch.setattr(ort, "_loads", lambda library: True)
    with pytest.raises(SpotDeployError, match="another provider") as caught:
        build_engine(tiny_bundle, provider=provider, force=True)
    assert caught.value.exit_code == 4


def test_too_little_memory_or_disk_is_refused_before_anything(tiny_copy, monkeypatch):
    before = sorted(tiny_copy.rglob("*"))
    monkeypatch.setattr(machine, "memory_free", lambda: 1 << 20)
    with pytest.raises(SpotDeployError, match="memory") as caught:
        build_engine(tiny_copy, threads=1, force=True)
    assert caught.value.exit_code == 4
    assert sorted(tiny_copy.rglob("*")) == before
    assert build_engine(tiny_copy, threads=1, force=True, check_limits=False)[1]
    with pytest.raises(SpotDeployError, match="disk"):
        Estimate(0, None, 2, 1).require()
    Estimate(1 << 60, None, 1 << 60, None).require()  # unknown is no reason to refuse


def test_memory_free_reads_system_and_cgroup(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert machine.memory_free(tmp_path) == 3000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert machine.memory_free(tmp_path) == 3000 << 10
    (group / "memory.max").write_text("1005\n")
    assert machine.memory_free(tmp_path) == 1000
    assert machine.memory_free(tmp_path / "nothing") is None


def test_estimate_covers_what_a_build_took(tiny_copy):
    """The estimate may be generous, never below the truth: the child's own peak is the truth."""
    plan = plan_build(tiny_copy, BuildOptions(threads=1))
    record, _ = build_engine(tiny_copy, threads=1, force=True, in_child=True)
    assert record.build["peak_memory"] < plan.estimate.memory


limits = st.builds(
    Limits,
    block_width=st.sampled_from((4, 8, 32)),
    buckets=st.lists(st.sampled_from((64, 128, 256, 512)), min_size=1, unique=True).map(sorted).map(tuple),
    budgets=st.lists(st.integers(1, 40), unique=True).map(lambda b: (0, *sorted(b))),
    budget=st.just(0),
    requests=st.integers(1, 8),
    prefill_positions=st.integers(32, 512),
    window=st.integers(32, 33),
    whole=st.sampled_from((0, 1024)),
)


@given(limits, st.data())
def test_profiles_rise_and_hold_what_the_runtime_runs(made, data):
    shape = TargetShape(layers=2, kv_heads=2, head_dim=16, vocab=320, raw_confidence=False)
    made = replace(made, budget=data.draw(st.sampled_from(made.budgets)))
    profiles = target_profiles(made)
    assert [p.role for p in profiles] == ["refresh" if made.whole else "prefill", "draft-free", "speculate"]
    for profile in profiles:
        assert (profile.symbols["P"][0], profile.symbols["P"][2]) == (made.buckets[0], made.buckets[-1])
        assert profile.symbols["P"][1] in made.buckets
    names = {spec.name for spec in shape.signature().inputs}
    for profile in profiles:
        shapes = profile.shapes(shape)
        assert set(shapes) == names
        for least, best, most in shapes.values():
            assert all(0 < a <= b <= c for a, b, c in zip(least, best, most, strict=True))
    speculate = profiles[2].symbols
    for budget in made.budgets:
        assert speculate["S"][0] <= 1 + budget <= speculate["S"][2]
        assert (1 + budget) * made.block_width <= speculate["M"][2]
    assert speculate["Q"] == (made.window,) * 3
    assert order_profile(made)[2] >= 1 + made.budgets[-1]


def test_limits_name_every_fault():
    with pytest.raises(ValueError, match="budgets") as caught:
        Limits(32, (64, 32), (3,), 8, 0, 8, 16)
    for word in ("buckets", "requests", "prefill_positions", "the budget 8", "window"):
        assert word in str(caught.value)


# The building process


def fail(*, kind, say):
    say("failing")
    if kind == "error":
        raise SpotDeployError("made-up", "it failed", seen="a", wanted="b", fix="c", exit_code=3)
    if kind == "bug":
        raise ZeroDivisionError
    if kind == "disk":
        raise OSError(28, "No space left on device", "x")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def importable(monkeypatch):
    """The child can import this file's `fail`."""
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    return "test_building:fail"


def test_errors_of_the_child_are_the_parents(importable):
    said = []
    with pytest.raises(SpotDeployError, match="it failed") as caught:
        run_in_child(importable, {"kind": "error"}, said.append)
    assert (caught.value.code, caught.value.seen, caught.value.exit_code) == ("made-up", "a", 3)
    assert said == ["failing"]


def test_a_child_that_is_killed_is_an_error(importable):
    with pytest.raises(SpotDeployError, match="ended before it was done") as caught:
        run_in_child(importable, {"kind": "kill"}, lambda text: None)
    assert "signal 9" in caught.value.seen
    assert "memory" in caught.value.fix


@pytest.mark.parametrize(("kind", "code"), [("bug", "bug"), ("disk", "os-error")])
def test_other_errors_of_the_child_are_told_without_a_traceback(importable, kind, code, capfd):
    with pytest.raises(SpotDeployError) as caught:
        run_in_child(importable, {"kind": kind}, lambda text: None)
    assert caught.value.code == code
    assert "Traceback" not in capfd.readouterr().err


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def started(process):
    """Wait until the building process is at work; returns its pid."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = children(process.pid)
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError("no child")


def gone(pid):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_interrupt_ends_a_build_and_leaves_nothing(heeding_signals, tiny_copy, delay):
    before = sorted(tiny_copy.rglob("*"))
    record = record_path(tiny_copy, "onnxruntime").read_bytes()
    process = subprocess.Popen(
        command("build-engine", tiny_copy, "--budgets", "0,60"), stderr=subprocess.PIPE, preexec_fn=heeding_signals
    )
    child = started(process)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the build was over before the signal")
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert gone(child)
    assert sorted(tiny_copy.rglob("*")) == before
    assert record_path(tiny_copy, "onnxruntime").read_bytes() == record


def test_the_child_ends_with_a_parent_that_was_killed(tiny_copy):
    process = subprocess.Popen(command("build-engine", tiny_copy, "--force"), stderr=subprocess.DEVNULL)
    child = started(process)
    process.kill()
    process.wait()
    assert gone(child)
    (left,) = (tiny_copy / "engines").glob(f"{STAGING}*")  # a killed process cleans nothing; doctor finds it
    assert left.is_dir()
    assert read_record(tiny_copy, "onnxruntime").exact
    assert build_engine(tiny_copy, threads=1, force=True)[1]


def test_what_is_not_ours_is_not_replaced(tiny_copy):
    folder = tiny_copy / "engines" / "openvino"
    (folder / "engine.json").write_text('{"format": "something else"}')
    with pytest.raises(SpotDeployError, match="already there"):
        build_engine(tiny_copy, backend="openvino", threads=1)
    assert (folder / "engine.json").read_text() == '{"format": "something else"}'


def test_an_engine_that_is_not_bit_exact_is_audited(tiny_copy, monkeypatch):
    """Logits that depend on batch mates in the last bits: the build audits drafted decoding and records what it saw."""
    real = backends.open_target

    class Shifty(HostSession):
        def __init__(self, session):
            self.session = session

        def run(self, inputs, *, keep):
            out = self.session.run(inputs, keep=keep)
            scale = np.float32(1 + 1e-6 * inputs.input_ids.shape[1])
            return replace(out, top_logits=out.top_logits * scale, row=lambda m: out.row(m) * scale)

    monkeypatch.setattr(backends, "open_target", lambda *a, **k: Shifty(real(*a, **k)))
    record, _ = build_engine(tiny_copy, threads=1, force=True)
    assert not record.exact
    assert record.exact_budget(1) == 0
    assert record.probe["isolation"]["unequal"] == 0
    assert record.probe["joining"]["unequal"] > 0
    assert record.audit["violations"] == 0
    assert record.audit["accepted"] >= 100
    assert building.read_record(tiny_copy, "onnxruntime").audit == record.audit


def test_a_compiled_engine_is_recorded_and_cannot_run_here(tiny_copy, tmp_path, monkeypatch):
    """TensorRT for RTX, built for real without a GPU."""
    monkeypatch.setenv("SPOT_DEPLOY_CACHE", str(tmp_path / "cache"))
    options = BuildOptions("tensorrt-rtx", precision="bf16", targets=("8.9", "sm120"), budgets=(3,))
    record, built = build_engine(tiny_copy, options, in_child=True)
    assert built
    assert record.inputs.targets == ("sm89", "sm120")
    assert record.inputs.layout == "packed"
    assert (record.probe, record.smoke, record.exact) == (None, None, False)
    assert set(record.files) == {"target-packed-bf16.engine", "order.engine"}
    folder = tiny_copy / "engines" / "tensorrt-rtx"
    for name, entry in record.files.items():
        assert (folder / name).stat().st_size == entry["bytes"]
    target = record.build["compiler"]["graphs"]["target-packed-bf16"]
    assert list(target["profiles"]) == ["prefill", "draft-free", "speculate"]
    assert list((tmp_path / "cache").glob("*.cache"))
    assert not build_engine(tiny_copy, options)[1]
    again = replace(options, targets=("8.9",))
    assert plan_build(tiny_copy, again).changes == ["targets: sm89,sm120 -> sm89"]
    with pytest.raises(SpotDeployError, match="driver") as caught:
        Runtime.load(tiny_copy, backend="tensorrt-rtx")
    assert caught.value.exit_code == 4


def test_damaged_engine_files_are_not_up_to_date(tiny_copy, tmp_path, monkeypatch):
    """Cut short, changed, removed: seen by the plan, by doctor and by whoever opens the engine."""
    monkeypatch.setenv("SPOT_DEPLOY_CACHE", str(tmp_path / "cache"))
    options = BuildOptions("tensorrt-rtx", precision="f16", targets=("sm89",), budgets=(3,))
    build_engine(tiny_copy, options)
    path = tiny_copy / "engines" / "tensorrt-rtx" / "order.engine"
    whole = path.read_bytes()
    for damage, words in ((whole[:-1], "bytes"), (whole[:-1] + b"x", "changed"), (None, "missing")):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        (line,) = plan_build(tiny_copy, options).changes
        assert words in line
        (fault,) = diagnose([tiny_copy], clean=False)["bundles"][0]["faults"]
        assert "damaged" in fault
    path.write_bytes(whole)
    assert plan_build(tiny_copy, options).up_to_date


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "spot-deploy-engine", "schema_version": 1}'])
def test_a_damaged_record_is_built_anew(tiny_copy, content):
    path = record_path(tiny_copy, "onnxruntime")
    path.write_text(content)
    if content == "[]":  # valid JSON of something else: not ours to replace
        with pytest.raises(SpotDeployError, match="already there"):
            build_engine(tiny_copy, threads=1)
        return
    assert build_engine(tiny_copy, threads=1)[1]
    assert read_record(tiny_copy, "onnxruntime").exact


def test_a_timing_cache_that_cannot_be_is_no_reason_to_fail(tiny_copy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPOT_DEPLOY_CACHE", str(tmp_path / "file" / "x"))
    said = []
    options = BuildOptions("tensorrt-rtx", precision="f16", targets=("sm89",), budgets=(3,))
    assert build_engine(tiny_copy, options, in_child=True, say=said.append)[1]
    assert any("timing cache" in text for text in said)


def test_an_engine_far_off_among_others_is_refused_not_audited(tiny_copy, monkeypatch):
    real = backends.open_target

    class Reversed(HostSession):
        def __init__(self, session):
            self.session = session

        def run(self, inputs, *, keep):
            out = self.session.run(inputs, keep=keep)
            if inputs.input_ids.shape[1] <= 9:
                return out
            return replace(out, top_ids=out.top_ids[:, ::-1].copy(), row=lambda m: out.row(m)[::-1].copy())

    monkeypatch.setattr(backends, "open_target", lambda *a, **k: Reversed(real(*a, **k)))
    before = record_path(tiny_copy, "onnxruntime").read_bytes()
    with pytest.raises(SpotDeployError, match="joining") as caught:
        build_engine(tiny_copy, threads=1, force=True, budgets=(3, 12))
    assert caught.value.exit_code == 3
    assert record_path(tiny_copy, "onnxruntime").read_bytes() == before


def test_few_drafts_a_run_are_made_up_for_by_more_runs(tiny_copy):
    from spot_deploy.verification import verify_engine

    build_engine(tiny_copy, threads=1, budgets=(1,))
    bundle = open_bundle(tiny_copy)
    record = read_record(tiny_copy, "onnxruntime")
    session = bundle.open_target(record)
    with Runtime.from_bundle(bundle, record, target=session) as runtime:
        gates = verify_engine(bundle, runtime, session, precision="f32", budgets=(0, 1), requests=1)
        assert gates[-1].passed
        assert gates[-1].figures["accepted"] >= 100
        gates = verify_engine(bundle, runtime, session, precision="f32", budgets=(0,), requests=1)
        assert gates[-1].text == "nothing can be drafted"
