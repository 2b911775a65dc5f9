"""Engines: the probe finds what it must find, records are checked, signatures are compared."""

from __future__ import annotations

import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from toy_target import ToyTarget

from spot_deploy import SpotDeployError, build_engine
from spot_deploy.engines import backends, ort, ov
from spot_deploy.engines.contracts import GraphSignature, TargetInputs, TargetOutputs, TargetShape, order_signature
from spot_deploy.engines.prefix import HostSession
from spot_deploy.engines.probe import probe_invariance
from spot_deploy.engines.record import open_record, record_path
from spot_deploy.runtime.manifest import read_manifest


class Leaky(HostSession):
    """A session whose rows depend on something besides their own state, in the last bits."""

    def __init__(self, session, kind):
        self.session, self.kind = session, kind

    def run(self, inputs, *, keep):
        out = self.session.run(inputs, keep=keep)
        ids = inputs.input_ids[0]
        amount = {"size": len(ids), "mates": int(ids.sum()) % 97, "rows": len(inputs.rows)}[self.kind]
        logits = out.top_logits * np.float32(1 + amount * 2e-7)
        return TargetOutputs(logits, out.top_ids, out.rest_lse, out.rest_lse_raw, out.row, out.kept)


@pytest.fixture(scope="module", params=backends.CPU_BACKENDS)
def session(request, tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    file, signature = manifest.graph("target-split")
    return backends.open_target(request.param, tiny_bundle / file, signature, threads=1, precision="f32")


def passes(count, segments):
    """Passes of one shape and other contents."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield TargetInputs(
            input_ids=rng.integers(0, 299, (1, segments, 8)),
            position_base=np.full((1, segments), 16),
            parent=np.full((1, segments), -1),
            own_mask=np.zeros((8, 8), np.float32),
            past_len=np.array([16]),
            inv_temperature=np.ones(1, np.float32),
            keep=np.zeros((1, 1), np.int64),
            rows=np.arange(8 * segments),
            past=[rng.standard_normal((1, 2, 16, 16)).astype(np.float32) for _ in range(4)],
        )


def logits(outputs, inputs):
    return np.stack([outputs.row(i) for i in range(len(inputs.rows))])


def test_rows_fetched_late_are_those_of_their_own_pass(session):
    """Results stay what they were while later passes run, dropped in any order, and one of them kept to the end."""
    inputs = [*passes(7, 3), *passes(3, 1)]
    wanted = [logits(session.run(x, keep=False), x) for x in inputs]
    assert all((a != b).any() for a, b in itertools.combinations(wanted, 2) if a.shape == b.shape)
    held = {}
    for index, x in enumerate(inputs):
        held[index] = session.run(x, keep=False)
        if index % 3 == 2:
            del held[index - 1]
    for index, outputs in reversed(held.items()):
        np.testing.assert_array_equal(logits(outputs, inputs[index]), wanted[index])


def test_rows_of_concurrent_threads(session):
    inputs = list(passes(6, 2))
    wanted = [logits(session.run(x, keep=False), x) for x in inputs]

    def work(index):
        for _ in range(5):
            outputs = session.run(inputs[index], keep=False)
            time.sleep(0.001)
            np.testing.assert_array_equal(logits(outputs, inputs[index]), wanted[index])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_openvino_uses_requests_again(tiny_bundle):
    file, signature = read_manifest(tiny_bundle).graph("target-split")
    target = ov.Target(tiny_bundle / file, signature, 1, "f32")
    made = []
    create = target._model._compiled.create_infer_request

    class Counting:
        def create_infer_request(self):
            made.append(create())
            return made[-1]

    target._model._compiled = Counting()
    stale = None
    for x in passes(8, 2):
        stale = target.run(x, keep=False)  # the one before lives until this one is there
    assert len(made) == 2
    assert stale.row(0).shape == (320,)


CGROUPS = {
    "v2": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "v2-unlimited": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "v2-parent-is-tighter": (
        {
            "proc/self/cgroup": "0::/user.slice/run.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/user.slice/run.scope/cpu.max": "400000 100000\n",
        },
        2.0,
    ),
    "v2-path-outside": ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        0.5,
    ),
    "v1-unlimited": (
        {
            "proc/self/cgroup": "3:cpu:/docker/abc\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "damaged": ({"proc/self/cgroup": "what\n0::/\n", "sys/fs/cgroup/cpu.max": "a b c\n"}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize(("files", "wanted"), CGROUPS.values(), ids=CGROUPS.keys())
def test_default_threads_keep_to_the_quota(tmp_path, monkeypatch, files, wanted):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    quota = backends.cpu_quota(tmp_path)
    assert quota == wanted
    monkeypatch.setattr(backends, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert backends.default_threads() == (4 if wanted is None else max(1, int(wanted)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7}, raising=False)
    assert backends.default_threads() == 1


def probe(session):
    shape = TargetShape(layers=2, kv_heads=2, head_dim=16, vocab=320, raw_confidence=False)
    return probe_invariance(session, shape, 8, (16, 64), 9)


def test_probe_passes_the_split_layout(session):
    result = probe(session)
    assert result["strict"] is True
    assert result["max_abs"] == result["unequal"] == 0
    assert result["comparisons"] > 40


@pytest.mark.parametrize("kind", ["size", "mates", "rows"])
def test_probe_catches_dependence_on_batch_mates(session, kind):
    assert probe(Leaky(session, kind))["strict"] is False


def test_packed_layout_is_built_and_its_probe_recorded(tiny_copy):
    record, built = build_engine(tiny_copy, backend="onnxruntime", layout="packed", threads=1)
    assert built
    assert record.inputs.layout == "packed"
    document = json.loads(record_path(tiny_copy, "onnxruntime").read_text())
    assert document["probe"]["strict"] is record.exact
    assert document["smoke"]["commits"] > 100


def test_build_is_up_to_date_the_second_time(tiny_copy):
    _, built = build_engine(tiny_copy, backend="onnxruntime", threads=1)
    assert not built
    assert build_engine(tiny_copy, backend="onnxruntime", threads=2)[1]
    assert build_engine(tiny_copy, backend="onnxruntime", threads=2, force=True)[1]


def test_engine_of_another_bundle_or_machine_is_refused(tiny_copy):
    manifest = read_manifest(tiny_copy)
    path = record_path(tiny_copy, "onnxruntime")
    original = path.read_text()
    for field, value, code in (
        ("inputs.bundle_id", "0" * 64, "engine-stale"),
        ("inputs.versions", {"onnxruntime": "0.1", "processor": "abacus"}, "engine-elsewhere"),
        ("inputs.layout", "diagonal", "engine-record"),
        ("inputs.threads", 0, "engine-record"),
        ("inputs.budgets", [3, 0], "engine-record"),
        ("inputs.budgets", "0", "engine-record"),
        ("inputs.backend", "openvino", "engine-record"),
        ("inputs", None, "engine-record"),
        ("probe", {}, "engine-record"),
        ("probe", None, "engine-record"),
        ("probe.strict", False, "engine-record"),
        ("probe.unequal", 3, "engine-record"),
        ("probe.states", 1_000_000, "engine-record"),
        ("audit", {}, "engine-record"),
        ("inputs.targets", [1], "engine-record"),
        ("inputs.provider", "abacus", "engine-elsewhere"),
        ("inputs.precision", "f16", "engine-elsewhere"),
        ("files", {"lost": {"bytes": 1, "sha256": ""}}, "engine-damaged"),
        ("files", {"../x": {"bytes": 1, "sha256": ""}}, "engine-record"),
        ("format", "other", "engine-record"),
        ("schema_version", 1, "engine-record"),
    ):
        document = json.loads(original)
        *outer, name = field.split(".")
        (document[outer[0]] if outer else document)[name] = value
        path.write_text(json.dumps(document))
        with pytest.raises(SpotDeployError) as caught:
            open_record(tiny_copy, "onnxruntime", manifest.bundle_id)
        assert caught.value.code == code, field
        assert "build-engine" in caught.value.fix


def test_a_golden_trace_that_differs_fails_the_build(tiny_copy, monkeypatch):
    from spot_deploy import verification

    real = verification.read_json

    def changed(path, **options):
        golden = real(path, **options)
        golden["traces"][1]["commits"][7][1] ^= 1
        return golden

    path = record_path(tiny_copy, "onnxruntime")
    path.unlink()
    monkeypatch.setattr(verification, "read_json", changed)
    with pytest.raises(SpotDeployError, match="commit 7") as caught:
        build_engine(tiny_copy, backend="onnxruntime", threads=1)
    assert caught.value.exit_code == 3
    assert not path.exists()


def test_signature_of_another_graph_is_refused(tiny_bundle):
    shape = TargetShape(layers=2, kv_heads=2, head_dim=8, vocab=320, raw_confidence=False)
    with pytest.raises(SpotDeployError, match="not the one the manifest describes"):
        ort.Target(tiny_bundle / "target-split.onnx", shape.signature(), 1)


def test_signatures_survive_json():
    for signature in (TargetShape(3, 2, 16, 100, True).signature(), order_signature(32)):
        assert GraphSignature.from_dict(json.loads(json.dumps(signature.as_dict()))) == signature


def test_toy_target_is_invariant_too():
    target = ToyTarget(width=4, vocab=40, mask_id=39, head_width=33)
    shape = target.decoding.shape

    class WithoutPastCheck:
        def run(self, inputs, *, keep):
            filled = int(inputs.past_len[0])
            past = [np.zeros_like(inputs.past[0]), np.zeros_like(inputs.past[1])]
            past[1][0, 0, :filled, 0] = np.arange(filled)
            return target.run(type(inputs)(**{**vars(inputs), "past": past}), keep=keep)

    assert probe_invariance(WithoutPastCheck(), shape, 4, (8, 32), 3)["strict"]


def test_precision_that_the_processor_lacks_is_an_environment_error(monkeypatch):
    monkeypatch.setattr(ov, "precisions", lambda: ("f32",))
    for backend in backends.CPU_BACKENDS:
        assert backends.choose_precision(backend, "f32") == backends.choose_precision(backend, None) == "f32"
        with pytest.raises(SpotDeployError, match="bf16") as caught:
            backends.choose_precision(backend, "bf16")
        assert caught.value.exit_code == 4
    monkeypatch.setattr(ov, "precisions", lambda: ("bf16", "f32"))
    assert backends.choose_precision("openvino", None) == "bf16"


def test_openvino_takes_the_precision_it_is_told(tiny_bundle):
    signature = read_manifest(tiny_bundle).graph("target-split")[1]
    for precision in ov.precisions():
        if ov.graph_precision(precision) == "f32":
            compiled = ov._compile(tiny_bundle / "target-split.onnx", signature, 1, precision, "target")
            assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == precision


def test_backends_agree(tiny_bundle):
    """The same pass on both, in float32."""
    from spot_deploy import Runtime

    texts = []
    for backend in backends.CPU_BACKENDS:
        with Runtime.load(tiny_bundle, backend=backend) as runtime:
            result = runtime.generate("the cat sat", max_new_tokens=40, ignore_eos=True, budget=0)
            texts.append(result.token_ids)
            assert result.backend == backend
    assert texts[0] == texts[1]
