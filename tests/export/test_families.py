"""Every family from its published names and fields: exported, proven against the native class, decoded, drafted.

Export itself compares logits in prefill, denoise, opening and a tree of nine states with the native class, and commit
traces with straight-line loops; these tests look at what it wrote, and decode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, MASK, WIDTH, write_family

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.engines.contracts import LAYOUTS
from spot_deploy.engines.record import read_record
from spot_deploy.export import parity
from spot_deploy.export.bundle_writer import ExportOptions, export_bundle
from spot_deploy.export.checkpoint import open_checkpoint
from spot_deploy.export.decoder import MoeSpec, load_decoder, routing
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import OracleDrafter
from spot_deploy.training.replay import Trajectory
from spot_deploy.verification import verify_engine

ORDER_MODEL = Path(__file__).parents[2] / "demo" / "order-model"
FULL = {"llada", "llada-moe", "dream", "a2d-mdlm"}
# SDAR is exported by nearly every other test; the rest of the graphs below are those of another family.
EXPORTED = [name for name in FAMILIES if name not in ("sdar", "a2d-bd3lm")]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder, options = write_family(tmp_path_factory.mktemp("checkpoints"), request.param)
    return open_checkpoint(folder, **options)


def test_logits_are_those_of_the_native_class(checkpoint):
    tensors = checkpoint.tensors()
    native, own = (
        parity.Native(checkpoint, tensors),
        parity.OwnFloat32(checkpoint, load_decoder(checkpoint.spec, tensors)),
    )
    tokens = np.random.default_rng(0).integers(0, 290, (2, 3 * WIDTH))
    wanted, seen = native.logits(tokens), own.logits(tokens)
    finite = np.isfinite(wanted)
    assert np.array_equal(finite, np.isfinite(seen))
    assert np.abs(seen[finite] - wanted[finite]).max() < 1e-4
    assert np.abs(wanted[finite]).max() > 5  # no network of zeros


def test_layers_one_at_a_time_are_those_of_the_native_class(checkpoint):
    measured = parity.layer_parity(checkpoint, ["bf16"])
    assert len(measured) == 2 * checkpoint.spec.layers


def test_a_golden_pass_with_one_layer_in_memory_is_the_whole_networks(checkpoint):
    golden = parity.streamed_golden(checkpoint)
    own = parity.OwnFloat32(checkpoint, load_decoder(checkpoint.spec, checkpoint.tensors()))
    prefix = np.repeat(golden.clean[None], len(golden.states), axis=0)
    logits = own.logits(np.concatenate((prefix, golden.states), 1))[:, len(golden.clean) :].reshape(-1, 320)
    assert np.allclose(golden.top_logits, -np.sort(-logits, axis=1)[:, :33], atol=1e-4)


@pytest.fixture(scope="module", params=EXPORTED)
def exported(request, tmp_path_factory):
    folder, options = write_family(tmp_path_factory.mktemp("families"), request.param)
    output = folder.parent / "out.spot"
    wanted = ExportOptions(budgets=(0, 3, 8), budget=8, **options)
    manifest = export_bundle(folder, output, order_model=ORDER_MODEL, options=wanted)
    for backend in ("onnxruntime", "openvino"):
        build_engine(output, backend=backend, precision="f32", threads=1)
    return request.param, manifest, output


def test_every_gate_was_measured(exported):
    name, manifest, _ = exported
    measured = manifest.parity["measured"]
    gates = ["prefill.k.0", "denoise.logits", "opening.logits", "tree.logits", "opening.v.1"]
    traces = 4
    if name in FULL:
        gates += ["refresh.logits", "refresh.k.1", "frozen.logits"]
        traces = 8
    for layout in LAYOUTS:
        for gate in gates:
            assert 0 <= measured[f"{layout}.{gate}"]["max_abs"] <= 2e-4
        for index in range(traces):
            assert measured[f"{layout}.trace{index}"]["first_difference"] is None
            assert measured[f"{layout}.trace{index}"]["commits"] >= 48
    assert manifest.decoding.exact_cache == (name not in FULL)
    assert manifest.decoding.mask_id == MASK
    assert manifest.decoding.block_width == WIDTH


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_drafts_change_nothing(exported, backend):
    """SPOT with the shipped order model, and a joint oracle, so that enough drafts are accepted to prove something."""
    name, manifest, bundle = exported
    accepted = 0
    with Runtime.load(bundle, backend=backend) as runtime:
        assert runtime.exact_budget == 8
        for whole in (False, True) if name in FULL else (False,):
            for temperature in (0.0, 1.0):
                for prompt in ("the cat sat on", [5, 17, 40]):
                    options = DecodeOptions(temperature=temperature, max_new_tokens=40, ignore_eos=True, whole=whole)
                    trajectory = Trajectory()
                    control = runtime.generate(prompt, options, budget=0, observe=trajectory)
                    oracle = OracleDrafter(trajectory.lookup, 32)
                    for drafter in (None, oracle):
                        result = runtime.generate(prompt, options, budget=8, drafter=drafter)
                        assert result.token_ids == control.token_ids
                        assert result.nfe + result.accepted + result.given == result.commits == control.commits
                        accepted += result.accepted
                    assert result.nfe < control.nfe
                    assert result.exact == (name not in FULL or whole)
                    blocks = len(manifest.decoding.blocks(result.prompt_tokens, 40))
                    assert result.refresh_forwards == (blocks if name in FULL and not whole else 0)
                    assert bool(result.given) == (name == "fast-dllm-v2")
    assert accepted >= 100


def test_verify_passes_every_gate(exported):
    _, _, bundle = exported
    record = read_record(bundle, "onnxruntime")
    opened = open_bundle(bundle)
    session = opened.open_target(record)
    with Runtime.from_bundle(opened, record, target=session) as runtime:
        gates = verify_engine(opened, runtime, session, precision="f32", budgets=(0, 3, 8), requests=1)
    assert [gate.name for gate in gates if not gate.passed] == []
    equality = next(gate for gate in gates if gate.name == "equality")
    assert equality.figures["accepted"] >= 100
    assert equality.figures["unequal"] == 0


def test_tensorrt_rtx_builds_the_graphs(exported):
    _, _, bundle = exported
    record, built = build_engine(bundle, backend="tensorrt-rtx", precision="f32", targets=("sm89",))
    assert built
    assert record.files


def test_no_fuse_is_refused_where_nothing_is_fused(exported):
    name, _, bundle = exported
    with Runtime.load(bundle) as runtime:
        if name in FULL or name == "fast-dllm-v2":
            with pytest.raises(SpotDeployError, match="never opens"):
                runtime.generate("the cat", fuse=False)
        else:
            result = runtime.generate("the cat", fuse=False, max_new_tokens=20, ignore_eos=True, budget=0)
            assert result.store_forwards == len(runtime.decoding.blocks(result.prompt_tokens, 20)) - 1


def test_whole_sequences_are_another_model_than_a_frozen_cache_and_need_full_attention(exported):
    name, _, bundle = exported
    with Runtime.load(bundle) as runtime:

        def tokens(whole):
            return runtime.generate([5, 17, 40], max_new_tokens=40, ignore_eos=True, budget=0, whole=whole).token_ids

        if name in FULL:
            assert tokens(whole=True) != tokens(whole=False)
        else:
            with pytest.raises(SpotDeployError, match="full attention"):
                tokens(whole=True)


def test_routing_takes_experts_of_the_best_groups_only():
    """Against the rule in words, row by row."""
    moe = MoeSpec(8, 2, 4, scoring="sigmoid", expert_bias=True, groups=4, groups_kept=2, scale=2.5)
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 8, generator=generator), torch.randn(8, generator=generator)
    weights = routing(logits, bias, moe)
    for row, seen in zip(logits.sigmoid(), weights, strict=True):
        choice = (row + bias).view(4, 2)
        groups = choice.sum(1).argsort(descending=True)[:2]
        allowed = [int(g) * 2 + i for g in groups for i in range(2)]
        chosen = sorted(allowed, key=lambda e: -float((row + bias)[e]))[:2]
        assert sorted(np.flatnonzero(seen.numpy())) == sorted(chosen)
        wanted = row[chosen] / row[chosen].sum() * 2.5
        assert torch.allclose(seen[chosen], wanted)


@pytest.mark.parametrize("bad", [{"per_token": 9}, {"groups": 3}, {"groups": 8}, {"scoring": "tanh"}], ids=str)
def test_routing_that_cannot_be(bad):
    with pytest.raises(ValueError, match="mixture"):
        MoeSpec(**{"experts": 8, "per_token": 2, "intermediate": 4} | bad)
