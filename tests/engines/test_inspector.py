"""What TensorRT's inspector says of engines, in the forms of its versions."""

from __future__ import annotations

import json
import re

import pytest

from spot_deploy.engines.inspector import Layer, parse_layers, summary, wrong_precision


def told(*layers):
    return json.dumps({"Layers": list(layers), "Bindings": ["input_ids"]})


def tensor(text):
    return {"Name": "x", "Location": "Device", "Dimensions": [-1, 32], "Format/Datatype": text}


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ("Half", "float16"),
        ("Row major linear FP16 format", "float16"),
        ("BFloat16", "bfloat16"),
        ("Row major linear BF16 format", "bfloat16"),
        ("Float", "float32"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("Int64", "int64"),
        ("FP8", "float8"),
        ("Bool", "bool"),
    ],
)
def test_dtypes_in_tensorrts_words(said, dtype):
    ten = {"Name": "a", "LayerType": "gemm", "Inputs": [tensor(said)], "Outputs": [], "TacticValue": "0x1"}
    eleven = ten | {"Inputs": [{"Name": "x", "Dimensions": [-1], "Datatype": said, "Format": "Row major linear"}]}
    assert parse_layers(told(ten)) == parse_layers(told(eleven)) == [Layer("a", "gemm", "0x1", (dtype,))]


def test_where_shapes_are_dynamic_weights_tell():
    layer = {
        "Name": "mlp",
        "LayerType": "CaskGemm",
        "Inputs": [tensor("N/A due to dynamic shapes")],
        "Outputs": [tensor("N/A due to dynamic shapes")],
        "Weights": {"Type": "Half", "Count": 4096},
        "TacticName": "sm80_xmma_gemm",
    }
    assert parse_layers(told(layer)) == [Layer("mlp", "CaskGemm", "sm80_xmma_gemm", ("float16",))]


def test_names_alone_tell_no_dtype():
    layers = parse_layers(told("gemm one", "softmax"))
    assert layers == [Layer("gemm one", "", "", ()), Layer("softmax", "", "", ())]
    assert summary(layers) == {"layers": {"?": 2}, "dtypes": {}, "untold": 2}
    assert all(wrong_precision(layers, precision) is None for precision in ("f32", "f16", "bf16"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Layers": {}}', '{"Layers"'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|Expecting|delimiter"):
        parse_layers(text)


def layer(*dtypes, tactic=""):
    return Layer("x", "gemm", tactic, dtypes)


@pytest.mark.parametrize(
    ("precision", "layers", "shown"),
    [
        ("f16", [layer("float32"), layer("int64")], "no layer is in float16: 1 in float32, 1 in int64"),
        ("bf16", [layer("float32", "float16")], "no layer is in bfloat16"),
        ("f32", [layer("float16")], "no layer is in float32"),
        ("f32", [layer("float32"), layer("float16", "float32")], r"layers in float16 \(1\)"),
        ("f32", [layer("float32", tactic="sm80_xmma_gemm_f32f32_tf32f32_f32")], "1 layers use TF32 kernels"),
    ],
)
def test_an_engine_in_another_precision_shows(precision, layers, shown):
    assert re.search(shown, wrong_precision(layers, precision))


@pytest.mark.parametrize(
    ("precision", "layers"),
    [
        ("f16", [layer("float16"), layer("float32")]),  # norms and log-sum-exps are in float32 by design
        ("bf16", [layer("bfloat16")]),
        ("f32", [layer("float32", tactic="sgemm_outf32"), layer("int64"), layer()]),
        ("f32", [layer("int64")]),
        ("int8", [layer("float32", "int8")]),
    ],
)
def test_an_engine_in_its_own_precision_does_not(precision, layers):
    assert wrong_precision(layers, precision) is None
