"""Forms of a mixture of experts in ONNX: what one layer costs on each backend, and whether rows stay independent.

* dense: every expert for every row, as three large products (what export writes).
* sorted: a Loop over the experts, each for the rows that chose it.
* contrib: ONNX Runtime's own operator, com.microsoft.MoE.

"independent": a row gives the same bits alone (twice, as a head is never computed on one row) and among others.

    python -P scripts/benchmark_moe.py -o moe.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from spot_deploy.engines import backends
from spot_deploy.engines.files import write_json

Arrays = dict[str, np.ndarray]
F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def model(nodes: list[Any], weights: Arrays, hidden: int, experts: int, contrib: bool = False) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "moe",
        [
            helper.make_tensor_value_info("x", F32, ["N", hidden]),
            helper.make_tensor_value_info("routing", F32, ["N", experts]),
        ],
        [helper.make_tensor_value_info("y", F32, ["N", hidden])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", 20), *([helper.make_opsetid("com.microsoft", 1)] if contrib else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def dense(w: Arrays, hidden: int, inner: int, experts: int) -> onnx.ModelProto:
    n = helper.make_node
    nodes = [
        n("Gemm", ["x", "gate"], ["g"], transB=1),
        n("Gemm", ["x", "up"], ["u"], transB=1),
        n("Sigmoid", ["g"], ["s"]),
        n("Mul", ["g", "s"], ["a"]),
        n("Mul", ["a", "u"], ["b"]),
        n("Reshape", ["b", "by_expert"], ["c"]),
        n("Unsqueeze", ["routing", "two"], ["r"]),
        n("Mul", ["c", "r"], ["d"]),
        n("Reshape", ["d", "flat"], ["e"]),
        n("Gemm", ["e", "down"], ["y"], transB=1),
    ]
    weights = {
        "gate": w["gate"].reshape(-1, hidden),
        "up": w["up"].reshape(-1, hidden),
        "down": np.ascontiguousarray(w["down"].transpose(1, 0, 2)).reshape(hidden, -1),
        "by_expert": np.array([-1, experts, inner]),
        "flat": np.array([-1, experts * inner]),
        "two": np.array([2]),
    }
    return model(nodes, weights, hidden, experts)


def sorted_rows(w: Arrays, hidden: int, inner: int, experts: int) -> onnx.ModelProto:
    n = helper.make_node
    body = helper.make_graph(
        [
            n("Identity", ["go"], ["go_on"]),
            n("Gather", ["routing", "i"], ["column"], axis=1),
            n("NonZero", ["column"], ["found"]),
            n("Transpose", ["found"], ["rows"], perm=[1, 0]),
            n("GatherND", ["x", "rows"], ["h"]),
            n("GatherND", ["column", "rows"], ["weight"]),
            n("Gather", ["gate", "i"], ["gate_i"], axis=0),
            n("Gather", ["up", "i"], ["up_i"], axis=0),
            n("Gather", ["down", "i"], ["down_i"], axis=0),
            n("Gemm", ["h", "gate_i"], ["g"], transB=1),
            n("Gemm", ["h", "up_i"], ["u"], transB=1),
            n("Sigmoid", ["g"], ["s"]),
            n("Mul", ["g", "s"], ["a"]),
            n("Mul", ["a", "u"], ["b"]),
            n("Gemm", ["b", "down_i"], ["o"], transB=1),
            n("Unsqueeze", ["weight", "one"], ["weight_1"]),
            n("Mul", ["o", "weight_1"], ["scaled"]),
            n("ScatterND", ["sum", "rows", "scaled"], ["sum_out"], reduction="add"),
        ],
        "expert",
        [
            helper.make_tensor_value_info("i", I64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", F32, ["N", hidden]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", F32, ["N", hidden]),
        ],
    )
    nodes = [
        n("Sub", ["x", "x"], ["zeros"]),
        n("Loop", ["count", "", "zeros"], ["y"], body=body),
    ]
    weights = {"count": np.array(experts), "one": np.array([1]), **{name: w[name] for name in ("gate", "up", "down")}}
    return model(nodes, weights, hidden, experts)


def contrib(w: Arrays, hidden: int, inner: int, experts: int, per_token: int) -> onnx.ModelProto:
    # The operator takes the softmax of what it is given and the best k of it: the logarithm undoes that.
    both = np.stack((w["gate"], w["up"]), 2).reshape(experts, 2 * inner, hidden)  # interleaved: swiglu_fusion 1
    nodes = [
        helper.make_node("Log", ["routing"], ["logits"]),
        helper.make_node(
            "MoE",
            ["x", "logits", "fc1", "", "fc2", ""],
            ["y"],
            domain="com.microsoft",
            k=per_token,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=1.0,
            activation_beta=0.0,
            normalize_routing_weights=1,
        ),
    ]
    return model(nodes, {"fc1": np.ascontiguousarray(both), "fc2": w["down"]}, hidden, experts, contrib=True)


def open_onnxruntime(path: Path, threads: int) -> Callable[[Arrays], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feeds: np.asarray(session.run(None, feeds)[0])


def open_openvino(path: Path, threads: int) -> Callable[[Arrays], np.ndarray]:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda feeds: np.array(next(iter(request.infer(feeds).values())))


def parses_in_tensorrt(path: Path) -> str:
    """What TensorRT for RTX says of the graph."""
    try:
        import tensorrt_rtx as trt
    except ImportError:
        return "not installed"
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(path)):
        return "yes"
    return str(parser.get_error(0).desc())[:120]


def measure(run: Callable[[Arrays], np.ndarray], feeds: Arrays, repeats: int) -> float:
    run(feeds)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(feeds)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 288])
    parser.add_argument("--threads", type=int, default=backends.default_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(), help="where the graphs are written")
    parser.add_argument("-o", "--output", type=Path, required=True, help="results file (JSON)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shapes = {"gate": (args.inner, args.hidden), "up": (args.inner, args.hidden), "down": (args.hidden, args.inner)}
    weights = {k: rng.standard_normal((args.experts, *s), np.float32) * np.float32(0.05) for k, s in shapes.items()}
    most = max(args.rows)
    x = rng.standard_normal((most, args.hidden), np.float32)
    scores = rng.random((most, args.experts), np.float32)
    kept = scores >= -np.sort(-scores, axis=1)[:, args.per_token - 1 : args.per_token]
    routing = np.where(kept, scores, 0).astype(np.float32)
    routing /= routing.sum(1, keepdims=True)
    sizes = (weights, args.hidden, args.inner, args.experts)
    forms = {"dense": dense(*sizes), "sorted": sorted_rows(*sizes), "contrib": contrib(*sizes, args.per_token)}
    rows: list[dict[str, Any]] = []
    wanted: np.ndarray | None = None
    for form, graph in forms.items():
        path = args.work / f"moe-{form}.onnx"
        onnx.save(graph, path)
        takes = parses_in_tensorrt(path)
        for backend, opener in {"onnxruntime": open_onnxruntime, "openvino": open_openvino}.items():
            entry: dict[str, Any] = {"form": form, "backend": backend, "tensorrt_parser": takes}
            rows.append(entry)
            try:
                run = opener(path, args.threads)
                whole = run({"x": x, "routing": routing})
            except Exception as error:  # a backend that lacks an operator says so in its own way
                entry["error"] = str(error).strip().splitlines()[0][:200]
                continue
            wanted = whole if wanted is None else wanted
            alone = [run({"x": x[[i, i]], "routing": routing[[i, i]]})[0] for i in range(0, most, 9)]
            entry["difference_to_dense"] = float(np.abs(whole - wanted).max())
            entry["independent"] = bool(np.array_equal(np.stack(alone), whole[::9]))
            entry["milliseconds"] = {
                str(n): 1e3 * measure(run, {"x": x[:n], "routing": routing[:n]}, args.repeats) for n in args.rows
            }
        path.unlink()
    document = {
        "format": "spot-deploy-moe-benchmark",
        "schema_version": 1,
        **{k: getattr(args, k) for k in ("hidden", "inner", "experts", "per_token", "threads")},
        "processor": backends.processor(),
        "versions": {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__},
        "rows": rows,
    }
    write_json(args.output, document)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
