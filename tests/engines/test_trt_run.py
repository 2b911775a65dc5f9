"""Running TensorRT engines, against doubles that do on the host what a GPU would do."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import gpu_double
import numpy as np
import pytest
import tensorrt_rtx as rtx
from tensorrt_api import bindings, describe

from spot_deploy import Runtime, SpotDeployError, build_engine, building
from spot_deploy.engines import cuda, ort, trt, trt_run
from spot_deploy.engines.contracts import Compiled
from spot_deploy.engines.files import sha256
from spot_deploy.engines.profiles import Limits, buffer_bytes, target_profiles
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.manifest import read_manifest
from spot_deploy.runtime.target import RequestTarget, request_target


@pytest.fixture
def runtime(monkeypatch):
    double = gpu_double.CudaRuntime()
    monkeypatch.setattr(cuda, "_runtime", lambda: double)
    return double


@pytest.fixture
def engine(tiny_bundle, tmp_path, runtime):
    """Opens the tiny target as an engine; keyword arguments are those of the double."""
    decoding = read_manifest(tiny_bundle).decoding
    signature = decoding.shape.signature()
    limits = Limits(
        block_width=decoding.block_width,
        buckets=decoding.buckets,
        budgets=(0, 3, 8),
        budget=8,
        requests=1,
        prefill_positions=decoding.prefill_positions,
        window=decoding.window,
    )
    profiles = [p.shapes(decoding.shape) for p in target_profiles(limits)]
    onnx = tiny_bundle / "target-split.onnx"

    def make(compiled=None, kind=None, **faults):
        path = gpu_double.write_plan(tmp_path / "target.engine", onnx, profiles, **(kind or {}))
        log = deque(maxlen=4)
        double = gpu_double.TensorRt(runtime, **faults)
        compiled = replace(compiled or Compiled(""), sha256=sha256(path))
        return trt_run.Engine(double, "tensorrt-rtx", path, signature, trt._logger(double, log), log, compiled)

    return decoding, signature, make


def commits(session, decoding, prompt, **options):
    target = session
    if not isinstance(session, RequestTarget):
        target = request_target(session, decoding, options["temperature"])
    chosen = DecodeOptions(max_new_tokens=40, ignore_eos=True, budget=0, **options)
    return [(e.position, e.token) for e in decode(target, decoding, np.array(prompt), chosen, None, Figures())]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_decode_is_that_of_the_onnx_file(engine, tiny_bundle, runtime, temperature):
    """Prefill, openings and states through device memory, over several buckets: equal commit by commit."""
    decoding, signature, make = engine
    session = trt_run.Target(make(), signature)
    host = ort.Target(tiny_bundle / "target-split.onnx", signature, 1)
    prompt = list(range(20, 61))
    wanted = commits(host, decoding, prompt, temperature=temperature)
    assert commits(session, decoding, prompt, temperature=temperature) == wanted
    assert len(wanted) >= 40
    # Keys and values went from buffer to buffer, and passes were replayed.
    assert runtime.copied[3] > 0
    assert runtime.launches > 10
    for _ in range(4):  # until every pass over every prefix has been recorded
        runtime.copied.clear()
        runtime.launches = 0
        target = request_target(session, decoding, temperature)
        assert commits(target, decoding, prompt, temperature=temperature) == wanted
    # Only heads and single rows come back; and all passes but prefill and openings are replayed.
    assert runtime.copied[2] == target.fetched
    assert runtime.launches >= len(wanted) - 8


@pytest.mark.parametrize(
    "name", [n for n in vars(gpu_double.CudaRuntime) if n.startswith("cuda") and n not in ("cudaMemcpyKind",)]
)
def test_cuda_doubles_have_real_names(name):
    from cuda.bindings import runtime as real

    assert hasattr(real, name)


@pytest.fixture(scope="module", params=["rtx", 10, 11])
def api(request):
    """Class to attribute to docstring of TensorRT for RTX, TensorRT 10 and 11."""
    return request.param, describe(rtx) if request.param == "rtx" else bindings(request.param)


# What TensorRT itself lacks; the code asks before it uses them.
RTX_ONLY = {
    "ComputeCapability",
    "EAGER",
    "EngineInvalidityDiagnostics",
    "EngineValidity",
    "INVALID",
    "create_runtime_cache",
    "deserialize",
    "dynamic_shapes_kernel_specialization_strategy",
    "num_compute_capabilities",
    "set_compute_capability",
    "set_runtime_cache",
}
ASKED_FOR = {"get_engine_validity", "is_stream_capturable"}


def test_every_name_that_the_code_uses_is_in_every_package(api):
    which, classes = api
    ours = describe(rtx)
    known = {name for attributes in ours.values() for name in attributes} | set(ours)
    offered = {name for attributes in classes.values() for name in attributes} | set(classes)
    tree = [ast.walk(ast.parse(inspect.getsource(module))) for module in (trt, trt_run)]
    used = {node.attr for nodes in tree for node in nodes if isinstance(node, ast.Attribute)} & known
    used |= set(trt._HARDWARE.values()) | {"VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL"}
    assert len(used) > 60
    assert used - offered == (set() if which == "rtx" else RTX_ONLY)


DOUBLES = {
    "IRuntimeCache": gpu_double.RuntimeCache,
    "IExecutionContext": gpu_double.ExecutionContext,
    "ICudaEngine": gpu_double.CudaEngine,
    "EngineInspector": gpu_double.EngineInspector,
    "Refitter": gpu_double.Refitter,
    "OnnxParserRefitter": gpu_double.OnnxParserRefitter,
    "Runtime": gpu_double.Runtime,
}


def test_tensorrt_doubles_have_real_methods_with_real_parameters(api):
    """A double's method takes what one of the real method's overloads takes, no more and under no other name."""
    which, classes = api
    checked = 0
    for name, double in DOUBLES.items():
        for method, function in vars(double).items():
            if method.startswith("_") or not inspect.isfunction(function):
                continue
            if which != "rtx" and (method in ASKED_FOR or name not in classes):
                continue
            text = classes[name][method]
            ours = list(inspect.signature(function).parameters)[1:]
            calls = re.findall(rf"{method}\(self: [^)]*?\) ->", text)
            theirs = [re.findall(r"(\w+): ", call)[1:] for call in calls]
            assert ours in theirs, (name, method, ours, theirs)
            checked += 1
    assert checked >= 20


def test_full_tensorrt_decodes_the_same(engine, tiny_bundle, runtime):
    """Without what only TensorRT for RTX has: runtime configurations with strategies, questions before capture."""
    decoding, signature, make = engine
    wanted = commits(ort.Target(tiny_bundle / "target-split.onnx", signature, 1), decoding, [5, 6, 7], temperature=1.0)
    session = trt_run.Target(make(rtx=False), signature)
    for _ in range(3):
        assert commits(session, decoding, [5, 6, 7], temperature=1.0) == wanted
    assert runtime.launches > 10


def test_passes_that_cannot_be_recorded_are_run_as_they_are(engine, tiny_bundle, runtime):
    decoding, signature, make = engine
    wanted = commits(ort.Target(tiny_bundle / "target-split.onnx", signature, 1), decoding, [5, 6, 7], temperature=1.0)
    session = trt_run.Target(make(), signature)
    runtime.captures = False
    for _ in range(2):
        assert commits(session, decoding, [5, 6, 7], temperature=1.0) == wanted
    assert not runtime.launches


def test_one_request_takes_one_lane(engine, runtime):
    """Rows of logits that the drafter may still ask for do not hold the buffers of a pass."""
    decoding, signature, make = engine
    session = trt_run.Target(make(), signature)
    commits(session, decoding, list(range(20, 61)), temperature=1.0)
    assert len(session._free) == 1
    assert len(session._spare_rows) <= 3


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    double = gpu_double.CudaRuntime()
    monkeypatch.setattr(cuda, "_runtime", lambda: double)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda flags: 0))
    assert cuda.missing_driver() is None
    monkeypatch.setattr(gpu_double.CudaRuntime, "cudaDriverGetVersion", lambda _: (gpu_double.Status(0), 12040))
    assert "supports CUDA 12, and cuda-bindings is for CUDA 13" in cuda.missing_driver()
    assert cuda.versions() == {}


@pytest.mark.parametrize(
    ("portable", "built", "here", "fits"),
    [
        ((), "A sm89", "A sm89", True),
        ((), "A sm89", "B sm89", False),
        (("same-sm",), "A sm89", "B sm89", True),
        (("same-sm",), "A sm86", "B sm89", False),
        (("ampere-plus",), "A sm80", "B sm89", True),
        (("ampere-plus",), "A sm80", "B sm75", False),
        (("version",), "A sm89", "B sm89", False),
        (("same-sm",), "A sm89", None, False),
    ],
)
def test_gpus_that_an_engine_may_move_to(portable, built, here, fits):
    assert building._fits(portable, built, here) == fits


def test_a_refused_plan_is_an_error_with_the_last_words(engine):
    _, _, make = engine
    with pytest.raises(SpotDeployError, match="did not give an engine") as caught:
        make(refuse="The engine plan file is not compatible with this version of TensorRT")
    assert "not compatible" in caught.value.seen
    assert "build-engine" in caught.value.fix


def test_logits_that_are_no_numbers_are_an_error(engine):
    decoding, signature, make = engine

    def spoil(name, value):
        return np.full_like(value, np.nan) if name == "top_logits" else value

    session = trt_run.Target(make(spoil=spoil), signature)
    with pytest.raises(SpotDeployError, match="no numbers") as caught:
        commits(session, decoding, [5, 6, 7], temperature=0.0)
    assert caught.value.code == "engine-nan"


def test_a_pass_outside_all_profiles_names_what_is_too_large(engine):
    decoding, signature, make = engine
    opened = make()
    shapes = {spec.name: opened.profiles[1][spec.name][1] for spec in signature.inputs}
    assert opened.choose(shapes) == 1
    shapes["input_ids"] = (1, 40, decoding.block_width)
    with pytest.raises(SpotDeployError, match="not built for such a pass") as caught:
        opened.choose(shapes)
    assert "input_ids [1, 40, 8] is not within [1, 1, 8] to" in caught.value.seen


def test_kernels_that_were_compiled_when_it_was_proven_are_used_again(engine, tmp_path, runtime):
    _, signature, make = engine
    blob = trt_run.Target(make(), signature).engine.compiled_kernels()
    assert blob is None  # nothing has run
    session = trt_run.Target(make(), signature)
    lane = session._lane()
    path = tmp_path / "target.kernels"
    path.write_bytes(session.engine.compiled_kernels())
    again = trt_run.Target(make(Compiled("", kernels=(path, sha256(path)))), signature)
    other = again._lane()
    assert again.engine._compiled_kernels.loaded == path.read_bytes()
    del lane, other
    digest = sha256(path)
    path.write_bytes(b"kernels of another machine")
    with pytest.raises(SpotDeployError, match=r"target\.kernels is not the file that was built"):
        trt_run.Target(make(Compiled("", kernels=(path, digest))), signature)._lane()
    with pytest.raises(SpotDeployError, match="refuses the kernels that were compiled for it"):
        trt_run.Target(make(Compiled("", kernels=(path, sha256(path)))), signature)._lane()


def test_a_full_gpu_is_an_error_and_memory_is_given_back(engine, runtime):
    decoding, signature, make = engine
    session = trt_run.Target(make(), signature)
    commits(session, decoding, [5, 6, 7], temperature=0.0)
    one = sum(map(len, runtime.blocks.values()))
    for _ in range(3):
        commits(session, decoding, [5, 6, 7], temperature=0.0)
    assert sum(map(len, runtime.blocks.values())) == one
    runtime.memory = one
    with pytest.raises(SpotDeployError, match="no memory left"):
        session.prefix(decoding.shape, 4096)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_host_arrays_become_sixteen_bits(dtype):
    import torch

    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32) * 100
    wanted = torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.int16).numpy()
    np.testing.assert_array_equal(cuda.as_dtype(x, dtype).view(np.int16), wanted)


@pytest.mark.parametrize("seen", ["version mismatch", "unsupported cc", "insufficient gpu memory, cuda error"])
def test_a_plan_that_tensorrt_calls_invalid_is_an_error_that_names_the_reasons(engine, seen):
    members = rtx.EngineInvalidityDiagnostics.__members__
    reasons = sum(int(members[name.upper().replace(" ", "_")]) for name in seen.split(", "))
    with pytest.raises(SpotDeployError, match=r"cannot run target\.engine here") as caught:
        engine[2](validity=(rtx.EngineValidity.INVALID, reasons))
    assert (caught.value.code, caught.value.seen, caught.value.exit_code) == ("engine-invalid", seen, 4)


def test_only_the_bytes_that_were_built_reach_tensorrt(engine, monkeypatch):
    """An engine may hold code for the host: a changed file must not even be looked at."""
    made = []
    monkeypatch.setattr(gpu_double.TensorRt, "Runtime", lambda *_: made.append(1))
    monkeypatch.setattr(sys.modules[__name__], "sha256", lambda path: "0" * 64)
    with pytest.raises(SpotDeployError, match="is not the file that was built") as caught:
        engine[2](Compiled("", host_code=True), {"host_code": True})
    assert caught.value.code == "engine-damaged"
    assert not made


def test_code_for_the_host_is_allowed_only_where_it_was_asked_for(engine):
    engine[2](Compiled("", host_code=True), {"host_code": True})
    with pytest.raises(SpotDeployError, match="did not give an engine"):
        engine[2](Compiled(""), {"host_code": True})


def test_an_engine_without_weights_takes_all_of_them_from_the_bundle(engine, tiny_bundle):
    decoding, signature, make = engine
    onnx = tiny_bundle / "target-split.onnx"
    session = trt_run.Target(make(Compiled("", weights=onnx), {"stripped": True}), signature)
    host = ort.Target(onnx, signature, 1)
    wanted, found = (commits(s, decoding, [5, 6, 7], temperature=0.0) for s in (host, session))
    assert found == wanted


def test_weights_that_are_not_there_are_an_error(engine, tiny_bundle, monkeypatch, tmp_path):
    make, onnx = engine[2], tiny_bundle / "target-split.onnx"
    with pytest.raises(SpotDeployError, match="does not take the weights") as caught:
        make(Compiled("", weights=tmp_path / "none.onnx"), {"stripped": True})
    assert (caught.value.code, caught.value.seen) == ("engine-refit", "Failed to open file")
    name = gpu_double.Refitter(make(kind={"stripped": True}).engine, None).names[3]
    monkeypatch.setattr(gpu_double.OnnxParserRefitter, "forgets", (name,))
    with pytest.raises(SpotDeployError, match="leaves 1 weights of the engine without values") as caught:
        make(Compiled("", weights=onnx), {"stripped": True})
    assert (caught.value.code, caught.value.seen) == ("engine-refit", name)
    monkeypatch.undo()
    monkeypatch.setattr(gpu_double.Refitter, "get_missing_weights", lambda self: ["merged.bias"])
    with pytest.raises(SpotDeployError, match=r"without values") as caught:
        make(Compiled("", weights=onnx), {"stripped": True})
    assert caught.value.seen == "merged.bias"


def test_an_account_that_is_no_json_is_an_error(engine, monkeypatch):
    opened = engine[2]()
    assert [(layer.kind, layer.dtypes) for layer in opened.layers()] == [("gemm", ("float32",))]
    monkeypatch.setattr(gpu_double.EngineInspector, "get_engine_information", lambda *_: "{")  # the build goes on
    with pytest.raises(SpotDeployError, match="account is not understood"):
        opened.layers()


class Machine:
    """A machine with a GPU whose TensorRT is a double. `compiles`: engines compiled; `dtype`: what layers are in."""

    def __init__(self, monkeypatch, cache):
        self.cuda, self.compiles, self.dtype, self.gpu = gpu_double.CudaRuntime(), 0, "Float", True
        self.tensorrt = gpu_double.TensorRt(self.cuda)
        monkeypatch.setenv("SPOT_DEPLOY_CACHE", str(cache))
        monkeypatch.setattr(cuda, "_runtime", lambda: self.cuda)
        monkeypatch.setattr(cuda, "missing_driver", lambda: None if self.gpu else "this machine has no NVIDIA driver")
        monkeypatch.setattr(trt.TensorRT, "_import", lambda _: self.tensorrt)
        monkeypatch.setattr(trt.TensorRT, "require", lambda _: None)
        monkeypatch.setattr(trt.TensorRT, "build", self.build)

    def build(self, jobs, folder, *, strip, portable, **options):
        self.compiles += 1
        kind = {"stripped": strip, "host_code": "version" in portable, "dtype": self.dtype}
        graphs = {}
        for job in jobs:
            profiles = list(job.profiles.values())
            path = gpu_double.write_plan(folder / f"{job.role}.engine", job.path, profiles, **kind)
            graphs[job.role] = {
                "engine": path.name, "bytes": path.stat().st_size, "sha256": sha256(path),
                "buffers": buffer_bytes(job.signature, job.largest),
            }  # fmt: skip
        return {"graphs": graphs}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path / "cache")


RTX = {"backend": "tensorrt-rtx", "precision": "f32", "layout": "split", "targets": ("sm89", "sm120")}
FULL = {"backend": "tensorrt", "precision": "f32", "layout": "split"}


def test_build_prove_and_run_as_on_a_gpu(tiny_copy, machine, monkeypatch):
    """The whole way of an engine, with the compiler's output in the place of a plan: same text as ONNX Runtime."""
    record, _ = build_engine(tiny_copy, **RTX)
    assert record.exact
    assert record.smoke["first_differences"] == [None] * record.smoke["traces"]
    assert record.build["layers"] == {"target-split": {"layers": {"gemm": 1}, "dtypes": {"float32": 1}, "untold": 0}}
    assert record.inputs.versions["gpu"] == "GPU of memory sm89"
    with Runtime.load(tiny_copy, backend="tensorrt-rtx") as gpu, Runtime.load(tiny_copy) as cpu:
        for temperature in (0.0, 1.0):
            ours, theirs = (
                r.generate([5, 6, 7], temperature=temperature, max_new_tokens=40, ignore_eos=True) for r in (gpu, cpu)
            )
            assert ours.token_ids == theirs.token_ids
            assert (ours.nfe, ours.exact) == (theirs.nfe, True)
        with pytest.raises(SpotDeployError, match="not compiled for so many drafts") as caught:
            gpu.generate([5, 6, 7], budget=9, max_new_tokens=8)
        assert (caught.value.wanted, caught.value.exit_code) == ("at most 8", 2)
    monkeypatch.setattr(gpu_double.CudaRuntime, "cudaDeviceGetAttribute", lambda *_: (gpu_double.Status(0), 7))
    with pytest.raises(SpotDeployError, match="built for other GPUs") as caught:
        Runtime.load(tiny_copy, backend="tensorrt-rtx")
    assert (caught.value.seen, caught.value.exit_code) == ("sm77", 4)


def test_an_engine_that_was_compiled_without_a_gpu_is_proven_where_there_is_one(tiny_copy, machine, monkeypatch):
    machine.gpu = False
    record, _ = build_engine(tiny_copy, **RTX)
    assert record.probe is None
    assert build_engine(tiny_copy, **RTX) == (record, False)  # nothing to gain here
    machine.gpu = True
    with pytest.raises(SpotDeployError, match="nothing is known of its exactness") as caught:
        Runtime.load(tiny_copy, backend="tensorrt-rtx")
    assert "--target sm89 --target sm120" in caught.value.fix
    proven, built = build_engine(tiny_copy, **RTX)
    assert (built, machine.compiles, proven.exact) == (True, 1, True)
    # What was compiled for this GPU while it was proven is kept, and is what runs.
    assert set(proven.files) - set(record.files) == {"target-split.kernels", "order.kernels"}
    assert record.files.items() <= proven.files.items()
    assert build_engine(tiny_copy, **RTX) == (proven, False)
    Runtime.load(tiny_copy, backend="tensorrt-rtx").close()
    # Kernels of another driver are no part of a new proof.
    with monkeypatch.context() as patched:
        patched.setattr(gpu_double.CudaRuntime, "cudaDriverGetVersion", lambda _: (gpu_double.Status(0), 13020))
        again, built = build_engine(tiny_copy, **RTX)
        assert (built, machine.compiles) == (True, 1)
        assert again.files["order.kernels"] != proven.files["order.kernels"]
    proven, built = build_engine(tiny_copy, **RTX)
    assert built
    # A machine without a GPU that shares the disk does not take the proof away.
    machine.gpu = False
    assert build_engine(tiny_copy, **RTX) == (proven, False)
    machine.gpu = True
    build_engine(tiny_copy, **RTX, force=True)
    assert machine.compiles == 2
    # What is built anew without a GPU does not claim to have been proven on the other machine's.
    machine.gpu = False
    record, _ = build_engine(tiny_copy, **RTX, force=True)
    assert record.probe is None
    assert "gpu" not in record.inputs.versions


def test_a_portable_engine_is_proven_again_by_a_later_version(tiny_copy, machine):
    options = FULL | {"portable": ("version", "same-sm"), "strip": True}
    record, _ = build_engine(tiny_copy, **options)
    assert record.inputs.portable == ("version", "same-sm")
    machine.tensorrt.__version__ = "11.9.0"
    with pytest.raises(SpotDeployError, match="built with other versions") as caught:
        Runtime.load(tiny_copy, backend="tensorrt")
    assert "--portable version --portable same-sm --strip" in caught.value.fix
    proven, built = build_engine(tiny_copy, **options)
    assert (built, machine.compiles, proven.inputs.versions["tensorrt"]) == (True, 1, "11.9.0")
    # One that is not portable is compiled again.
    build_engine(tiny_copy, **FULL)
    machine.tensorrt.__version__ = "11.9.1"
    build_engine(tiny_copy, **FULL)
    assert machine.compiles == 3


def test_an_engine_that_computes_in_another_precision_is_not_published(tiny_copy, machine):
    machine.dtype = "Half"
    with pytest.raises(SpotDeployError, match="does not compute in f32") as caught:
        build_engine(tiny_copy, **RTX)
    assert (caught.value.code, caught.value.exit_code) == ("engine-precision", 3)
    assert "float16" in caught.value.seen
    assert not (tiny_copy / "engines" / "tensorrt-rtx").exists()


def test_too_little_gpu_memory_is_told_before_anything_is_loaded(tiny_copy, machine):
    build_engine(tiny_copy, **RTX)
    # Room for the weights is not enough.
    plan = tiny_copy / "engines" / "tensorrt-rtx" / "target-split.engine"
    machine.cuda.memory = sum(map(len, machine.cuda.blocks.values())) + plan.stat().st_size + 100
    with pytest.raises(SpotDeployError, match="too little memory left") as caught:
        Runtime.load(tiny_copy, backend="tensorrt-rtx")
    assert (caught.value.code, caught.value.exit_code) == ("too-little-gpu-memory", 4)


def test_several_packages_for_other_versions_of_cuda_are_an_error(monkeypatch):
    installed = [SimpleNamespace(metadata={"Name": f"tensorrt_cu{n}_bindings"}) for n in (12, 13)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(trt.TensorRT, "_import", lambda _: None)
    with pytest.raises(SpotDeployError, match="overwrite each other") as caught:
        trt.FULL.require()
    assert (caught.value.code, caught.value.exit_code) == ("backend-clash", 4)
    assert "tensorrt-cu12-bindings tensorrt-cu13-bindings" in caught.value.fix
