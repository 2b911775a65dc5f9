"""Target graphs in float16 and bfloat16: what the files hold, what they compute, and gates that can fail."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir
import openvino
import pytest
import torch
from safetensors.torch import load_file

from spot_deploy import SpotDeployError
from spot_deploy.engines import ort
from spot_deploy.engines.contracts import LAYOUTS, MASKED
from spot_deploy.export import parity
from spot_deploy.export.bundle_writer import ExportOptions
from spot_deploy.export.checkpoint import open_checkpoint
from spot_deploy.export.decoder import Decoder
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.export.trace import save_graph
from spot_deploy.export.weights import save_weights
from spot_deploy.runtime.manifest import read_manifest

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ROLES = [(layout, precision) for layout in LAYOUTS for precision in DTYPES]
# Sixteen bits against float32, in the file as in the gates: twenty roundings of the largest value.
RELATIVE = {"f16": 20 * 2**-11, "bf16": 20 * 2**-8}
WIDTH, VOCAB, MASK, HEADS, SIZE, LAYERS = 8, 320, 299, 2, 16, 2


@pytest.mark.parametrize(("layout", "precision"), ROLES)
def test_files_refer_to_the_one_copy_of_the_weights(layout, precision, tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    entry = manifest.graphs[f"target-{layout}-{precision}"]
    assert entry["opset"] == 23
    assert entry["float32_nodes"].get("Softmax", 0) == (LAYERS if layout == "split" else 0)
    assert manifest.parity["measured"][f"{layout}-{precision}.trace0"]["commits"] >= 48
    path = tiny_bundle / entry["file"]
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import}[""] == 23
    weights = load_file(tiny_bundle / "weights.safetensors")
    outside = {i.name.removeprefix("decoder."): i for i in model.graph.initializer if i.external_data}
    assert set(outside) == set(weights)
    assert {i.data_type for i in outside.values()} == {onnx.TensorProto.FLOAT}  # the checkpoint's, cast in the graph
    assert sum(int(np.prod(i.dims)) for i in model.graph.initializer if not i.external_data) < 2000
    assert path.stat().st_size < 400_000
    gemms = [n for n in model.graph.node if n.op_type == "Gemm"]
    assert len(gemms) == 7 * LAYERS + 1
    assert all({a.name: a.i for a in g.attribute}["transB"] == 1 for g in gemms)


@pytest.mark.parametrize(("layout", "precision"), ROLES)
def test_packed_is_the_attention_operator_without_past_or_present(layout, precision, tiny_bundle):
    path = tiny_bundle / f"target-{layout}-{precision}.onnx"
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    attention = [n for n in nodes if n.op_type == "Attention"]
    assert len(attention) == (LAYERS if layout == "packed" else 0)
    for node in attention:
        assert [bool(name) for name in node.output] == [True]
        assert len(node.input) == 4
        assert all(node.input)
    assert any(n.op_type == "RMSNormalization" for n in nodes)


class OnOpenVINO:
    """A graph on OpenVINO, computed in float32 between the graph's own casts; float32 arrays outside."""

    KINDS = {"f32": openvino.Type.f32, "f16": openvino.Type.f16, "bf16": openvino.Type.bf16}  # noqa: RUF012

    def __init__(self, path, precision):
        core = openvino.Core()
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        self.request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
        self.kind, self.dtype = self.KINDS[precision], DTYPES.get(precision, torch.float32)

    def __call__(self, past, **inputs):
        for name, array in inputs.items():
            self.request.set_tensor(name, openvino.Tensor(np.ascontiguousarray(array)))
        for name, array in past.items():
            tensor = openvino.Tensor(self.kind, array.shape)
            bits = torch.from_numpy(array).to(self.dtype).contiguous().view(torch.uint8).numpy()
            np.copyto(tensor.data.view(np.uint8), bits.reshape(tensor.data.view(np.uint8).shape))
            self.request.set_tensor(f"past_{name}", tensor)
        self.request.infer()
        return {
            port.get_any_name(): self.read(port.get_any_name()) for port in self.request.get_compiled_model().outputs
        }

    def read(self, name):
        tensor = self.request.get_tensor(name)
        if tensor.element_type != self.kind:
            return tensor.data.copy()
        raw = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.uint8).copy())
        return raw.view(self.dtype).reshape(tuple(tensor.shape)).float().numpy()


def passes(run):
    """Two requests through a prefill with a block-causal mask and a pass of four states, one with a parent."""
    rng = np.random.default_rng(8)
    usable = np.arange(290)
    clean = rng.choice(usable, (2, 1, 2 * WIDTH))
    block = np.arange(2 * WIDTH) // WIDTH
    causal = np.where(block[:, None] >= block[None], 0.0, MASKED).astype(np.float32)
    shared = {"inv_temperature": np.array([1.0, 0.5], np.float32)}
    empty = {f"{kind}.{i}": np.full((2, HEADS, 2, SIZE), 7.0, np.float32) for i in range(LAYERS) for kind in "kv"}
    first = run(
        empty,
        input_ids=clean,
        position_base=np.zeros((2, 1), np.int64),
        parent=np.full((2, 1), -1),
        own_mask=causal,
        past_len=np.zeros(2, np.int64),
        keep=np.zeros((2, 1), np.int64),
        rows=np.arange(4 * WIDTH),
        **shared,
    )
    past = {}
    for name in empty:
        past[name] = np.full((2, HEADS, 3 * WIDTH, SIZE), 50.0, np.float32)  # beyond past_len: must not matter
        past[name][:, :, : 2 * WIDTH] = first[name][:, 0]
    states = rng.choice(usable, (2, 4, WIDTH))
    states[rng.random(states.shape) < 0.5] = MASK
    base = np.full((2, 4), 2 * WIDTH)
    parent = np.full((2, 4), -1)
    parent[:, 2], base[:, 2] = 0, 3 * WIDTH
    second = run(
        past,
        input_ids=states,
        position_base=base,
        parent=parent,
        own_mask=np.zeros((WIDTH, WIDTH), np.float32),
        past_len=np.full(2, 2 * WIDTH),
        keep=np.array([[0, 2], [2, 0]]),
        rows=np.arange(8 * WIDTH),
        **shared,
    )
    return first, second


@pytest.fixture(scope="module")
def float32_passes(tiny_bundle):
    return passes(OnOpenVINO(tiny_bundle / "target-split.onnx", "f32"))


@pytest.mark.parametrize(("layout", "precision"), ROLES)
def test_files_compute_what_the_float32_graph_does(layout, precision, tiny_bundle, float32_passes):
    seen = passes(OnOpenVINO(tiny_bundle / f"target-{layout}-{precision}.onnx", precision))
    for ours, wanted in zip(seen, float32_passes, strict=True):
        signature = read_manifest(tiny_bundle).graph(f"target-{layout}-{precision}")[1]
        assert set(ours) == {t.name for t in signature.outputs}
        for name in ("logits", *signature.kept_names):
            finite = np.isfinite(wanted[name])
            assert np.array_equal(np.isfinite(ours[name]), finite), name
            assert finite.mean() > 0.9
            difference = np.abs(ours[name][finite] - wanted[name][finite]).max()
            assert 0 < difference < RELATIVE[precision] * np.abs(wanted[name][finite]).max(), name
        clear = np.diff(np.sort(wanted["logits"], -1)[:, -2:], axis=-1)[:, 0] > 1.0
        assert clear.sum() > 10
        assert np.array_equal(ours["logits"].argmax(-1)[clear], wanted["logits"].argmax(-1)[clear])
        # The head is float32: it agrees with the graph's own logits far below the graph's precision.
        row = np.sort(ours["logits"], -1)[:, ::-1]
        np.testing.assert_allclose(ours["top_logits"], row[:, :33], atol=1e-5)
        inverse = np.repeat([1.0, 0.5], len(row) // 2)[:, None]
        rest = (row[:, 33:299] * inverse).astype(np.float64)
        expected = np.log(np.exp(rest - rest.max(-1, keepdims=True)).sum(-1)) + rest.max(-1)
        np.testing.assert_allclose(ours["rest_lse"], expected, atol=1e-4)


def test_onnxruntime_takes_the_float16_file(tiny_bundle):
    file, signature = read_manifest(tiny_bundle).graph("target-packed-f16")
    ort.Target(tiny_bundle / file, signature, 1)


def test_gates_of_every_graph_are_recorded(tiny_bundle):
    measured = read_manifest(tiny_bundle).parity["measured"]
    names = [f"{layout}-{precision}" for layout, precision in ROLES] + [f"{layout}-f16.file" for layout in LAYOUTS]
    for name in names:
        for gate in ("prefill.k.0", "tree.logits", "denoise.logits", "opening.logits", "opening.v.1"):
            entry = measured[f"{name}.{gate}"]
            assert 1e-5 < entry["max_abs"] <= entry["allowed"], name
        assert measured[f"{name}.head.rest_lse"]["max_abs"] < 1e-5
        assert measured[f"{name}.tree.argmax"]["rows"] == parity.TREE_STATES * WIDTH


@pytest.fixture
def halves(tiny_checkpoint):
    checkpoint = open_checkpoint(tiny_checkpoint)
    decoder = Decoder(checkpoint.spec).eval()
    decoder.load_state_dict(checkpoint.tensors())

    def gates(precision, change):
        half = copy.deepcopy(decoder).to(DTYPES[precision])
        with torch.no_grad():
            change(half)
        modules = {"packed": TargetGraph(half, checkpoint.banned, "packed", False)}
        measured = parity.half_parity(checkpoint, decoder, precision, modules, {}, [])
        assert len(measured) > 10

    return gates


def break_norm(network):
    network.layers[1].post_norm.eps = 0.5


def overflow(network):
    network.layers[0].up.weight *= 3e4
    network.layers[0].gate.weight *= 3e4


@pytest.mark.parametrize("change", [break_norm, overflow])
def test_gates_can_fail(change, halves):
    halves("bf16", lambda network: None)
    with pytest.raises(SpotDeployError, match="parity gate packed-f16") as caught:
        halves("f16", change)
    assert caught.value.exit_code == 3


def hand_made(folder, values, dtype):
    """A graph `y = x + decoder.w + decoder.u`, with weights in `dtype` that are stored as they are given."""
    places = save_weights(values, folder / "weights.safetensors")
    kind = {torch.float32: onnx_ir.DataType.FLOAT, torch.float16: onnx_ir.DataType.FLOAT16}[dtype]
    x = onnx_ir.Value(name="x", type=onnx_ir.TensorType(kind), shape=onnx_ir.Shape([4]))
    weights = []
    for name, tensor in values.items():
        const = onnx_ir.tensor(tensor.to(dtype).numpy(), name=f"decoder.{name}")
        value = onnx_ir.Value(name=const.name, type=onnx_ir.TensorType(kind), shape=const.shape, const_value=const)
        weights.append(value)
    first = onnx_ir.node("Add", [x, weights[0]])
    second = onnx_ir.node("Add", [first.outputs[0], weights[-1]])
    second.outputs[0].name = "y"
    second.outputs[0].type, second.outputs[0].shape = x.type, x.shape
    graph = onnx_ir.Graph(
        [x], second.outputs, nodes=[first, second], initializers=weights, opset_imports={"": 20}, name="g"
    )
    return onnx_ir.Model(graph, ir_version=10), places


def test_weights_of_another_dtype_are_cast_in_the_graph(tmp_path):
    import onnxruntime

    stored = {"u": torch.tensor([1.0, 2.0, 3.0, 1e-3]), "w": torch.tensor([0.5, -1.0, 2.5, 3.0]).bfloat16()}
    model, places = hand_made(tmp_path, stored, torch.float32)
    save_graph(model, tmp_path / "g.onnx", external=places, prefix="decoder.")
    loaded = onnx.load(str(tmp_path / "g.onnx"), load_external_data=False)
    kinds = {i.name: (i.data_type, bool(i.external_data)) for i in loaded.graph.initializer}
    assert kinds == {
        "decoder.u": (onnx.TensorProto.FLOAT, True),
        "decoder.w": (onnx.TensorProto.BFLOAT16, True),
    }
    assert [n.op_type for n in loaded.graph.node] == ["Cast", "Add", "Add"]
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx")
    (seen,) = session.run(None, {"x": np.ones(4, np.float32)})
    np.testing.assert_array_equal(seen, 1 + stored["u"].numpy() + stored["w"].float().numpy())


def test_a_bfloat16_checkpoint_is_stored_once_as_it_is(demo_bundle):
    weights = load_file(demo_bundle / "weights.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    model = onnx.load(str(demo_bundle / "target-split.onnx"), load_external_data=False)
    outside = {i.name.removeprefix("decoder."): i.data_type for i in model.graph.initializer if i.external_data}
    # The demo's head is tied to its embedding: one tensor, under either name.
    assert {name.replace("head.", "embed.") for name in outside} == set(weights)
    assert set(outside.values()) == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("bad", [("f64",), ("f16", "f16"), ("f32",), ("",)], ids=str)
def test_precisions_that_cannot_be_written(bad):
    with pytest.raises(SpotDeployError, match="precisions") as caught:
        ExportOptions(precisions=bad)
    assert caught.value.exit_code == 2
    assert "f16, bf16" in caught.value.wanted
