"""Quantised target graphs: codes and scales, what the graphs compute, what they weigh, and what is measured of them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from spot_deploy import SpotDeployError, build_engine
from spot_deploy.engines import backends, ort
from spot_deploy.engines.contracts import WEIGHT_PRECISIONS
from spot_deploy.export import parity, quantize
from spot_deploy.export.bundle_writer import ExportOptions, export_bundle
from spot_deploy.export.checkpoint import open_checkpoint
from spot_deploy.export.decoder import Decoder
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.runtime.manifest import read_manifest
from spot_deploy.runtime.target import BlockCausalTarget

PROMPTS = ([5, 6, 7], list(range(20, 40)))


def unpack(codes, scales):
    """Straight NumPy: two codes a byte, the first in the low half, 8 is zero, one scale a block."""
    outer, blocks, half = codes.shape
    weight = np.zeros((outer, blocks, 2 * half), np.float32)
    for place in range(2 * half):
        byte = codes[:, :, place // 2].astype(int)
        weight[:, :, place] = ((byte // 16 if place % 2 else byte % 16) - 8) * scales
    return weight.reshape(outer, -1)


def dequantised(folder, precision):
    """All parameters as the graphs of a precision have them, float32, by name."""
    stored = load_file(folder / quantize.weights_file(precision))
    weights = {n: t for n, t in stored.items() if not n.endswith((".scale", ".zero", "." + precision))}
    for name in [n.removesuffix(".scale") for n in stored if n.endswith(".scale")]:
        codes, scales = stored[f"{name}.{precision}"].numpy(), stored[f"{name}.scale"].numpy()
        value = unpack(codes, scales) if precision == "int4" else codes.astype(np.float32) * scales[:, None]
        weights[name] = torch.from_numpy(value)
    return weights


def graph_of(checkpoint, tensors):
    decoder = Decoder(checkpoint.spec)
    decoder.load_state_dict(tensors, strict=not checkpoint.spec.tied_head)
    return TargetGraph(decoder, checkpoint.banned, "split", False)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def usable(checkpoint):
    return np.flatnonzero(~checkpoint.banned.numpy())


@pytest.fixture(scope="module")
def seen(checkpoint, usable):
    return quantize.calibrate(graph_of(checkpoint, checkpoint.tensors()), checkpoint.decoding, usable, PROMPTS)


@pytest.fixture
def float_graphs(tiny_bundle, tmp_path):
    """The float32 graphs in a folder of one's own."""
    for name in ("target-split.onnx", "target-packed.onnx", "weights.safetensors"):
        shutil.copyfile(tiny_bundle / name, tmp_path / name)
    return tmp_path


def logits(session, decoding, usable, seed=9):
    """Rows of nine partly masked states, and keys and values of the prefix."""
    prefix, states = parity.random_states(decoding, usable, 9, seed)
    target = BlockCausalTarget(session, decoding, 1.0)
    target.prefill(prefix)
    rows = np.stack([h.row(i) for h in target.verify(states, 0) for i in range(len(h.positions))])
    return rows[:, usable], target.cache.past


@pytest.mark.parametrize("inner", [16, 32, 48, 96])
def test_int4_codes_say_what_was_rounded(inner):
    rng = np.random.default_rng(inner)
    block = quantize.int4_block(inner)
    assert block == (32 if inner % 32 == 0 else 16)
    weight = rng.standard_normal((7, inner)).astype(np.float32)
    weight[3] = 0
    weight[5, :16] = 1e-44
    codes, scales = quantize.pack_int4(weight, np.ones(inner))
    assert (codes.dtype, codes.shape) == (np.uint8, (7, inner // block, block // 2))
    assert (scales.dtype, scales.shape) == (np.float32, (7, inner // block))
    error = np.abs(unpack(codes, scales) - weight)
    assert (error[3] == 0).all()
    # Half a step, or what a smaller scale cuts off at the ends.
    largest = np.abs(weight).reshape(7, -1, block).max(-1)
    assert (error.reshape(7, -1, block).max(-1) <= largest * (1 - min(quantize.SHRINKS) * 7 / 8) + 1e-6).all()
    plain = np.rint(np.clip(weight.reshape(7, -1, block) / (largest[..., None] / 7 + 1e-9), -7, 7))
    plain_error = np.square(plain * (largest[..., None] / 7) - weight.reshape(7, -1, block)).sum()
    assert np.square(error).sum() < plain_error


def test_int4_weights_on_the_grid_are_kept_and_importance_decides():
    rng = np.random.default_rng(0)
    grid = rng.integers(-7, 8, (5, 2, 32)).astype(np.float32)
    grid[:, :, 11] = -8
    weight = (grid * np.array([0.5, 2.0], np.float32)[:, None]).reshape(5, 64)
    np.testing.assert_array_equal(unpack(*quantize.pack_int4(weight, np.ones(64))), weight)
    weight = rng.standard_normal((40, 32)).astype(np.float32)
    heavy = np.ones(32)
    heavy[:4] = 1000
    errors = [np.square(unpack(*quantize.pack_int4(weight, i)) - weight)[:, :4].sum() for i in (np.ones(32), heavy)]
    assert errors[1] < errors[0]


def test_int8_codes_stay_where_pairs_of_products_fit_16_bits():
    weight = np.random.default_rng(0).standard_normal((9, 40)).astype(np.float32)
    weight[4] = 0
    codes, scales = quantize.round_int8(weight)
    assert codes.dtype == np.int8
    largest = int(np.abs(codes.astype(int)).max())
    assert 2 * 255 * largest < 2**15
    assert largest == 64
    assert (np.abs(codes * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()


def test_calibration_is_deterministic_and_sees_every_layer(checkpoint, usable, seen):
    tensors = checkpoint.tensors()
    again = quantize.calibrate(graph_of(checkpoint, tensors), checkpoint.decoding, usable, PROMPTS)
    assert set(seen) == {n for n, t in tensors.items() if t.dim() == 2 and n != "embed.weight"}
    for name, entry in seen.items():
        assert entry.largest.max() > 0, name
        np.testing.assert_array_equal(entry.largest, again[name].largest)
        np.testing.assert_array_equal(entry.square, again[name].square)


def test_evening_out_keeps_the_network(checkpoint, usable, seen):
    tensors = checkpoint.tensors()
    tensors["layers.0.up.weight"][5] *= 50  # an input of the down projection that is much larger than the others
    graph, signature = graph_of(checkpoint, tensors), checkpoint.decoding.shape.signature()
    measured = quantize.calibrate(graph, checkpoint.decoding, usable, PROMPTS)
    even, expected = quantize.even_out(tensors, measured)
    assert {n for n in tensors if not torch.equal(tensors[n], even[n])} == {
        f"layers.{i}.{kind}.weight" for i in (0, 1) for kind in ("up", "down")
    }
    graphs = (graph, graph_of(checkpoint, even))
    before, after = (logits(parity.TorchTarget(g, signature), checkpoint.decoding, usable)[0] for g in graphs)
    np.testing.assert_allclose(after, before, atol=1e-3)
    again = quantize.calibrate(graphs[1], checkpoint.decoding, usable, PROMPTS)["layers.0.down.weight"]
    np.testing.assert_allclose(again.largest, expected["layers.0.down.weight"].largest, rtol=1e-3)
    spread = [np.log(x["layers.0.down.weight"].largest).std() for x in (measured, expected)]
    assert spread[1] < 0.8 * spread[0]


@pytest.mark.parametrize("backend", backends.CPU_BACKENDS)
@pytest.mark.parametrize("layout", ["split", "packed"])
@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
def test_graph_computes_with_the_dequantised_weights(quantised_bundle, checkpoint, usable, backend, layout, precision):
    """Against torch with dequantised weights; for int8 its linear layers round their inputs as the graph says."""
    file, signature = read_manifest(quantised_bundle).graph(f"target-{layout}-{precision}")
    session = backends.open_target(backend, quantised_bundle / file, signature, threads=1, precision=precision)
    graph = graph_of(checkpoint, dequantised(quantised_bundle, precision))
    if precision == "int8":
        model = onnx.load(quantised_bundle / file)
        constants = {i.name: i for i in model.graph.initializer}
        made_by = {o: n for n in model.graph.node for o in n.output}
        modules = dict(graph.decoder.named_modules())
        gemms = [n for n in model.graph.node if n.op_type == "Gemm"]
        assert len(gemms) == sum(isinstance(m, torch.nn.Linear) for m in modules.values())
        for gemm in gemms:
            scale = float(onnx.numpy_helper.to_array(constants[made_by[gemm.input[0]].input[1]]))
            weight = made_by[gemm.input[1]].input[0]
            name = weight.removeprefix("decoder.").removesuffix(".weight.int8")

            def rounding(_, args, scale=scale):
                return (torch.clamp(torch.round(args[0] / scale), -128, 127) * scale,)

            modules[name].register_forward_pre_hook(rounding)
    wanted, wanted_past = logits(parity.TorchTarget(graph, signature), checkpoint.decoding, usable)
    found, past = logits(session, checkpoint.decoding, usable)
    float_graph = graph_of(checkpoint, checkpoint.tensors())
    plain, _ = logits(parity.TorchTarget(float_graph, signature), checkpoint.decoding, usable)
    cost = np.abs(plain - wanted)
    assert cost.max() > 0.05  # what quantisation costs can be told from what the graphs differ by
    if precision == "int4":
        assert np.abs(found - wanted).max() < 1e-3
    else:  # where a value lies between two codes the last bit decides, and the difference grows from layer to layer
        assert np.abs(found - wanted).mean() < 0.5 * cost.mean()
    for a, b in zip(past, wanted_past, strict=True):
        assert np.abs(a - b).mean() < 1e-2


@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
def test_nothing_is_scaled_while_running(quantised_bundle, precision):
    """No operator that finds a scale in its input, where a row would depend on its batch mates."""
    for layout in ("split", "packed"):
        model = onnx.load(quantised_bundle / f"target-{layout}-{precision}.onnx", load_external_data=False)
        constants = {i.name for i in model.graph.initializer}
        kinds = {n.op_type for n in model.graph.node}
        assert not {k for k in kinds if k.startswith("Dynamic") or "Integer" in k}
        assert ("MatMulNBits" in kinds) == (precision == "int4")
        assert ("QuantizeLinear" in kinds) == (precision == "int8")
        for node in model.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                assert node.input[1] in constants
            if node.op_type == "MatMulNBits":
                assert {a.name: a.i for a in node.attribute}["accuracy_level"] == 1


def test_onnxruntime_multiplies_integers(quantised_bundle, tmp_path):
    """Without zero points of the weights it would put them back to float32 on every pass, and be slower for it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(quantised_bundle / "target-split-int8.onnx", options)
    kinds = [n.op_type for n in onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph.node]
    assert kinds.count("QGemm") == 2 * 7 + 1
    assert "Gemm" not in kinds


def test_files_hold_every_weight_once(quantised_bundle):
    sizes = {p.name: p.stat().st_size for p in quantised_bundle.iterdir() if p.is_file()}
    tensors = load_file(quantised_bundle / "weights.safetensors")
    linear = {n: t for n, t in tensors.items() if t.dim() == 2 and n != "embed.weight"}
    others = 4 * sum(t.numel() for n, t in tensors.items() if n not in linear)
    head = tensors["head.weight"].numel()
    body = [t.shape for n, t in linear.items() if n != "head.weight"]
    int4 = sum(o * i // 2 + 4 * o * i // quantize.int4_block(i) for o, i in body) + 4 * head + others
    int8 = sum(t.numel() + 5 * t.shape[0] for t in linear.values()) + others
    for precision, wanted in (("int4", int4), ("int8", int8)):
        name = quantize.weights_file(precision)
        assert wanted <= sizes[name] < wanted + 20_000
        for layout in ("split", "packed"):
            model = onnx.load(quantised_bundle / f"target-{layout}-{precision}.onnx", load_external_data=False)
            outside = [i for i in model.graph.initializer if i.external_data]
            assert {e.value for i in outside for e in i.external_data if e.key == "location"} == {name}
            assert len(outside) == len(load_file(quantised_bundle / name))
            assert sum(int(np.prod(i.dims)) for i in model.graph.initializer if not i.external_data) < 2000
    entries = {f.path: f.bytes for f in read_manifest(quantised_bundle).files}
    assert entries["weights-int4.safetensors"] == sizes["weights-int4.safetensors"]


def test_what_was_measured_is_in_the_manifest(quantised_bundle):
    measured = read_manifest(quantised_bundle).parity["measured"]
    for name in ("split-int8", "packed-int8", "split-int4", "packed-int4"):
        assert measured[f"{name}.logits"]["max_abs"] > 0
        assert 0.5 < measured[f"{name}.logits"]["cosine"] < 1
        argmax = measured[f"{name}.argmax"]
        assert argmax["agreement"] == 1 - argmax["differ"] / argmax["rows"] >= parity.ARGMAX_FLOOR
        assert argmax["rows"] > 30
        trace = measured[f"{name}.trace0"]
        assert trace["first_difference"] is None or trace["first_difference"] < trace["commits"]
    # 8 bits come closer than 4.
    assert measured["split-int8.logits"]["cosine"] > measured["split-int4.logits"]["cosine"]


@pytest.mark.parametrize("damage", ["nibbles", "scales", "infinite"])
def test_a_wrong_graph_fails_the_gate(float_graphs, checkpoint, usable, seen, monkeypatch, damage):
    real = quantize.pack_int4

    def broken(weight, importance):
        codes, scales = real(weight, importance)
        if damage == "nibbles":
            return codes >> 4 | codes << 4, scales
        return codes, scales[:, ::-1].copy() * -1 if damage == "scales" else scales * np.float32(np.inf)

    graphs = {layout: f"target-{layout}.onnx" for layout in ("split", "packed")}

    def measure():
        quantize.write_graphs("int4", float_graphs, graphs, checkpoint.tensors(), seen)
        return parity.against_f32("int4", float_graphs, checkpoint.decoding, usable, [])

    assert measure()["split-int4.argmax"]["agreement"] >= parity.ARGMAX_FLOOR
    monkeypatch.setattr(quantize, "pack_int4", broken)
    with pytest.raises(SpotDeployError, match="parity gate split-int4") as caught:
        measure()
    assert caught.value.exit_code == 3


def test_tied_head_is_quantised_in_int8_and_kept_in_int4(checkpoint, usable, seen, float_graphs):
    """A tied head is the embedding: its name is not among the tensors, and the graph names one of the two for both."""
    tensors = {n: t for n, t in checkpoint.tensors().items() if n != "head.weight"}
    tied = replace(checkpoint, spec=replace(checkpoint.spec, tied_head=True))
    from spot_deploy.export.trace import save_graph, trace_target
    from spot_deploy.export.weights import save_weights

    decoding = checkpoint.decoding
    offsets = save_weights(tensors, float_graphs / "weights.safetensors")
    offsets["head.weight"] = offsets["embed.weight"]
    traced = trace_target(tied.spec, tied.banned, "split", decoding.shape, decoding.block_width)
    save_graph(traced, float_graphs / "target-split.onnx", external=offsets, prefix="decoder.")
    wanted, _ = logits(ort.Target(float_graphs / "target-split.onnx", decoding.shape.signature(), 1), decoding, usable)
    for precision in WEIGHT_PRECISIONS:
        files = quantize.write_graphs(precision, float_graphs, {"split": "target-split.onnx"}, tensors, seen)
        stored = load_file(float_graphs / quantize.weights_file(precision))
        assert ("head.weight.int8" in stored) == (precision == "int8")
        assert "embed.weight" in stored
        session = ort.Target(float_graphs / files["split"], decoding.shape.signature(precision), 1, precision)
        found, _ = logits(session, decoding, usable)
        assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.3


@pytest.mark.parametrize("name", ["sdar-moe", "llada2"])
def test_mixtures_of_experts_are_quantised_but_not_their_routers(name, tmp_path):
    """Every gate passes. Random routers flip easily, so logits agree less than those of dense targets."""
    from tiny_families import write_family

    folder, options = write_family(tmp_path, name)
    wanted = ExportOptions(budgets=(0, 3), budget=3, precisions=("int8", "int4"), **options)
    measured = export_bundle(folder, tmp_path / "out.spot", order_model=None, options=wanted).parity["measured"]
    routers = {n for n in load_file(tmp_path / "out.spot" / "weights.safetensors") if n.endswith(".router.weight")}
    assert routers
    for precision in WEIGHT_PRECISIONS:
        stored = load_file(tmp_path / "out.spot" / quantize.weights_file(precision))
        assert routers <= set(stored)
        assert {n for n in stored if n.endswith(f".down.weight.{precision}")}
        for layout in ("split", "packed"):
            assert measured[f"{layout}-{precision}.logits"]["cosine"] > 0.75
            assert measured[f"{layout}-{precision}.argmax"]["agreement"] >= parity.ARGMAX_FLOOR
        build_engine(tmp_path / "out.spot", backend="onnxruntime", precision=precision, threads=1)


def test_inner_sizes_that_cannot_be_quantised():
    with pytest.raises(SpotDeployError, match="multiples of 16") as caught:
        quantize.int4_block(40)
    assert caught.value.code == "quantize-size"


def test_a_linear_layer_that_is_not_the_decoders_is_refused(float_graphs, checkpoint, seen):
    fewer = {n: entry for n, entry in seen.items() if n != "layers.1.down.weight"}
    with pytest.raises(SpotDeployError, match="other linear layers"):
        quantize.write_graphs("int8", float_graphs, {"split": "target-split.onnx"}, checkpoint.tensors(), fewer)


@pytest.mark.parametrize("bad", [("int3",), ("f32",), ("int4", "int4"), ("dynamic-int8",)], ids=str)
def test_precisions_that_export_does_not_write(bad):
    with pytest.raises(SpotDeployError, match="precisions") as caught:
        ExportOptions(precisions=bad)
    assert caught.value.exit_code == 2
    assert "int8" in caught.value.wanted
