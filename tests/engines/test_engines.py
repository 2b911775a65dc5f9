"""Engines: the probe finds what it must find, records are checked, signatures are compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
from toy_target import ToyTarget

from spot_deploy import SpotDeployError, build_engine
from spot_deploy.engines import backends, ort, ov
from spot_deploy.engines.contracts import GraphSignature, TargetOutputs, TargetShape, order_signature
from spot_deploy.engines.probe import probe_invariance
from spot_deploy.engines.record import read_record, record_path
from spot_deploy.runtime.manifest import read_manifest

CPU_BACKENDS = ("onnxruntime", "openvino")


class Leaky:
    """A session whose rows depend on something besides their own state, in the last bits."""

    def __init__(self, session, kind):
        self.session, self.kind = session, kind

    def run(self, inputs, *, keep):
        out = self.session.run(inputs, keep=keep)
        ids = inputs.input_ids[0]
        amount = {"size": len(ids), "mates": int(ids.sum()) % 97, "rows": len(inputs.rows)}[self.kind]
        logits = out.top_logits * np.float32(1 + amount * 2e-7)
        return TargetOutputs(logits, out.top_ids, out.rest_lse, out.rest_lse_raw, out.row, out.kept)


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def session(request, tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    file, signature = manifest.graph("target-split")
    return backends.open_target(request.param, tiny_bundle / file, signature, threads=1, precision="f32")


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
    assert record.layout == "packed"
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
        ("bundle_id", "0" * 64, "engine-stale"),
        ("versions", {"onnxruntime": "0.1", "processor": "abacus"}, "engine-elsewhere"),
        ("layout", "diagonal", "engine-record"),
        ("probe", {}, "engine-record"),
        ("threads", 0, "engine-record"),
        ("format", "other", "engine-record"),
    ):
        path.write_text(json.dumps(json.loads(original) | {field: value}))
        with pytest.raises(SpotDeployError) as caught:
            read_record(tiny_copy, "onnxruntime", manifest.bundle_id)
        assert caught.value.code == code
        assert "build-engine" in caught.value.fix


def test_a_golden_trace_that_differs_fails_the_build(tiny_copy, monkeypatch):
    from spot_deploy import building

    real = building.read_json

    def changed(path, **options):
        golden = real(path, **options)
        golden["traces"][1]["commits"][7][2] ^= 1
        return golden

    path = record_path(tiny_copy, "onnxruntime")
    path.unlink()
    monkeypatch.setattr(building, "read_json", changed)
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
    for backend in CPU_BACKENDS:
        assert backends.choose_precision(backend, "f32") == backends.choose_precision(backend, None) == "f32"
        with pytest.raises(SpotDeployError, match="bf16") as caught:
            backends.choose_precision(backend, "bf16")
        assert caught.value.exit_code == 4
    monkeypatch.setattr(ov, "precisions", lambda: ("bf16", "f32"))
    assert backends.choose_precision("openvino", None) == "bf16"


def test_openvino_takes_the_precision_it_is_told(tiny_bundle):
    signature = read_manifest(tiny_bundle).graph("target-split")[1]
    for precision in ov.precisions():
        compiled = ov._compile(tiny_bundle / "target-split.onnx", signature, 1, precision, "target")
        assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == precision


def test_backends_agree(tiny_bundle):
    """The same pass on both, in float32."""
    from spot_deploy import Runtime

    texts = []
    for backend in CPU_BACKENDS:
        with Runtime.load(tiny_bundle, backend=backend) as runtime:
            result = runtime.generate("the cat sat", max_new_tokens=40, ignore_eos=True, budget=0)
            texts.append(result.token_ids)
            assert result.backend == backend
    assert texts[0] == texts[1]
