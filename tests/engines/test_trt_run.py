"""Running TensorRT engines, against doubles that do on the host what a GPU would do."""

from __future__ import annotations

from collections import deque

import gpu_double
import numpy as np
import pytest

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.engines import cuda, ort, trt, trt_run
from spot_deploy.engines.files import sha256
from spot_deploy.engines.profiles import Limits, target_profiles
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.manifest import read_manifest
from spot_deploy.runtime.target import request_target


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
    path = gpu_double.write_plan(tmp_path / "target.engine", tiny_bundle / "target-split.onnx", profiles)

    def make(**faults):
        log = deque(maxlen=4)
        double = gpu_double.TensorRt(runtime, **faults)
        return trt_run.Engine(double, "tensorrt-rtx", path, signature, trt._logger(double, log), log)

    return decoding, signature, make


def commits(session, decoding, prompt, **options):
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
        before = session.downloaded
        runtime.copied.clear()
        assert commits(session, decoding, prompt, temperature=temperature) == wanted
    # Only heads and single rows come back.
    assert runtime.copied[2] == session.downloaded - before


@pytest.mark.parametrize(
    "name", [n for n in vars(gpu_double.CudaRuntime) if n.startswith("cuda") and n not in ("cudaMemcpyKind",)]
)
def test_cuda_doubles_have_real_names(name):
    from cuda.bindings import runtime as real

    assert hasattr(real, name)


def test_tensorrt_doubles_have_real_names():
    import tensorrt_rtx

    pairs = ((gpu_double.ExecutionContext, "IExecutionContext"), (gpu_double.CudaEngine, "ICudaEngine"))
    for double, name in pairs:
        public = {n for n in vars(double) if not n.startswith("_")}
        assert public <= set(dir(getattr(tensorrt_rtx, name)))
    for name in ("num_io_tensors", "num_optimization_profiles"):
        assert hasattr(tensorrt_rtx.ICudaEngine, name)
    assert hasattr(tensorrt_rtx.Runtime, "deserialize_cuda_engine")


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


def test_build_prove_and_run_as_on_a_gpu(tiny_copy, runtime, monkeypatch, tmp_path):
    """The whole way of an engine, with the compiler's output in the place of a plan: same text as ONNX Runtime."""
    monkeypatch.setenv("SPOT_DEPLOY_CACHE", str(tmp_path / "cache"))
    double = gpu_double.TensorRt(runtime)
    monkeypatch.setattr(cuda, "missing_driver", lambda: None)
    monkeypatch.setattr(trt.TensorRT, "_import", lambda self: double)

    def build(self, jobs, folder, **options):
        graphs = {}
        for job in jobs:
            path = gpu_double.write_plan(folder / f"{job.role}.engine", job.path, list(job.profiles.values()))
            graphs[job.role] = {"engine": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
        return {"graphs": graphs}

    monkeypatch.setattr(trt.TensorRT, "build", build)
    options = {"precision": "f32", "layout": "split", "targets": ("sm89", "sm120")}
    record, _ = build_engine(tiny_copy, backend="tensorrt-rtx", **options)
    assert record.exact
    assert record.smoke["first_differences"] == [None] * record.smoke["traces"]
    with Runtime.load(tiny_copy, backend="tensorrt-rtx") as gpu, Runtime.load(tiny_copy) as cpu:
        for temperature in (0.0, 1.0):
            ours, theirs = (
                r.generate([5, 6, 7], temperature=temperature, max_new_tokens=40, ignore_eos=True) for r in (gpu, cpu)
            )
            assert ours.token_ids == theirs.token_ids
            assert (ours.nfe, ours.exact) == (theirs.nfe, True)
    monkeypatch.setattr(gpu_double.CudaRuntime, "cudaDeviceGetAttribute", lambda *_: (gpu_double.Status(0), 7))
    with pytest.raises(SpotDeployError, match="built for other GPUs") as caught:
        Runtime.load(tiny_copy, backend="tensorrt-rtx")
    assert (caught.value.seen, caught.value.exit_code) == ("sm77", 4)
