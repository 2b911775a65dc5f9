"""Engines of quantised graphs: strict under the probe, exact under speculation, and what they are opened with."""

from __future__ import annotations

import re

import pytest

from spot_deploy import Runtime, SpotDeployError
from spot_deploy.engines import backends, ort, ov
from spot_deploy.engines.contracts import WEIGHT_PRECISIONS
from spot_deploy.engines.probe import probe_invariance
from spot_deploy.engines.record import EngineInputs, EngineRecord
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.runtime.drafters import OracleDrafter
from spot_deploy.training.replay import Trajectory

ENGINES = [(backend, precision) for backend in backends.CPU_BACKENDS for precision in WEIGHT_PRECISIONS]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(request, quantised_bundle):
    """A bundle, its record, and an open session."""
    backend, precision = request.param
    bundle = open_bundle(quantised_bundle)
    session = bundle.open_target(record(bundle, backend, precision, None))
    decoding = bundle.manifest.decoding
    probe = probe_invariance(session, decoding.shape, decoding.block_width, decoding.buckets, 9)
    return bundle, record(bundle, backend, precision, probe), session


def inputs(bundle, backend, precision):
    versions = backends.versions(backend)
    return EngineInputs(
        bundle.manifest.bundle_id, backend, "cpu", "split", precision, 1, (0, 3, 8), 1, (), (), False, versions
    )


def record(bundle, backend, precision, probe):
    return EngineRecord(
        inputs(bundle, backend, precision), profiles=[], probe=probe, smoke=None, audit=None, files={}, build={},
        created_at="",
    )  # fmt: skip


def test_no_row_depends_on_its_batch_mates(engine):
    probe = engine[1].probe
    assert probe["strict"] is True
    assert probe["comparisons"] > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_equals_draft_free_decoding(engine, temperature):
    bundle, made, _ = engine
    accepted = 0
    with Runtime.from_bundle(bundle, made) as runtime:
        for seed in range(2 if temperature else 1):
            trajectory = Trajectory()
            options = {"temperature": temperature, "seed": seed, "max_new_tokens": 90, "ignore_eos": True}
            control = runtime.generate("the cat sat", budget=0, observe=trajectory, **options)
            oracle = OracleDrafter(trajectory.lookup, bundle.manifest.decoding.shape.head_width - 1)
            for budget, drafter in ((3, None), (8, None), (8, oracle)):
                result = runtime.generate("the cat sat", budget=budget, drafter=drafter, **options)
                assert result.token_ids == control.token_ids
                assert result.exact is True
                assert result.nfe + result.accepted == result.commits
                accepted += result.accepted
        assert accepted > 100


def test_engines_of_a_precision_compute_something_else_than_float32(engine, tiny_runtime):
    """The graph of the precision was opened, not the float32 one."""
    bundle, made, session = engine
    with Runtime.from_bundle(bundle, made) as runtime:
        seen, wanted = [], []
        for one, rows in ((runtime, seen), (tiny_runtime, wanted)):
            one.generate(
                "the cat", budget=0, max_new_tokens=8, observe=lambda s, h, c, rows=rows: rows.append(h.row(0))
            )
    assert seen[0].shape == wanted[0].shape
    assert (seen[0] != wanted[0]).any()
    assert type(session) is (ort.HostTarget if made.inputs.backend == "onnxruntime" else ov.Target)


@pytest.mark.parametrize(("backend", "precision"), ENGINES)
def test_a_bundle_without_the_graph_says_how_to_get_it(tiny_bundle, backend, precision):
    bundle = open_bundle(tiny_bundle)
    made = record(bundle, backend, precision, {"strict": True, "states": 9})
    with pytest.raises(SpotDeployError, match=f"no target graph in {precision}") as caught:
        Runtime.from_bundle(bundle, made)
    assert caught.value.code == "graph-missing"
    assert re.search(rf"spot-deploy export .*--precisions {precision}", caught.value.fix)
    assert caught.value.wanted == f"target-split-{precision}"
    assert caught.value.exit_code == 2


def test_which_graph_a_precision_runs():
    for backend, precision in ENGINES:
        assert backends.graph_precision(backend, precision) == precision
        assert backends.choose_precision(backend, precision) == precision
        assert backends.choose_precision(backend, None) not in WEIGHT_PRECISIONS
    assert backends.graph_precision("openvino", "bf16") == backends.graph_precision("openvino", "f32") == "f32"


@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
def test_openvino_rounds_no_activations_of_its_own(quantised_bundle, precision):
    """Its default is groups of 32, found while running."""
    bundle = open_bundle(quantised_bundle)
    role = bundle.target_role(inputs(bundle, "openvino", precision))
    path, signature = bundle.graph_path(role), bundle.manifest.graph(role)[1]
    compiled = ov._compile(path, signature, 1, precision, "target")
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
