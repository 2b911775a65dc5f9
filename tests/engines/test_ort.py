"""ONNX Runtime's GPU providers: IO binding, with the CPU in the place of the GPU and its memory."""

from __future__ import annotations

import gpu_double
import numpy as np
import pytest

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.engines import cuda, ort
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.manifest import read_manifest
from spot_deploy.runtime.target import request_target


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose CUDA provider is the CPU's; its CUDA runtime, a double."""
    double = gpu_double.CudaRuntime()
    double._inside = lambda *_: None  # what ONNX Runtime allocates is no allocation of the double
    monkeypatch.setattr(cuda, "_runtime", lambda: double)
    monkeypatch.setattr(cuda, "missing_driver", lambda: None)
    monkeypatch.setattr(ort, "DEVICE", "cpu")
    monkeypatch.setitem(ort.PROVIDERS, "cuda", "CPUExecutionProvider")
    return double


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_decode_with_io_binding_is_that_of_plain_runs(gpu, tiny_bundle, temperature):
    """Prefill, openings and states over several buckets: equal commit by commit."""
    decoding = read_manifest(tiny_bundle).decoding
    signature = decoding.shape.signature()
    graph = tiny_bundle / "target-split.onnx"
    host, device = (ort.Target(graph, signature, 1, provider=provider) for provider in ("cpu", "cuda"))
    assert isinstance(device, ort.DeviceTarget)
    options = DecodeOptions(max_new_tokens=40, ignore_eos=True, budget=0, temperature=temperature)
    found, read = [], 0
    for session in (host, device):
        target = request_target(session, decoding, temperature)
        events = decode(target, decoding, np.arange(20, 61), options, None, Figures())
        found.append([(e.position, e.token) for e in events])
        read = target.fetched
    assert found[0] == found[1]
    # Keys and values went from buffer to buffer; of what passes gave, single rows were fetched, no more.
    assert gpu.copied[3] > 0
    rows = gpu.copied[2]
    assert rows % (4 * decoding.shape.vocab) == 0
    assert rows < read
    assert (rows > 0) == (temperature > 0)


def test_an_engine_on_a_gpu_provider_is_proven_and_tied_to_the_gpu(gpu, tiny_copy, monkeypatch):
    record, _ = build_engine(tiny_copy, provider="cuda", force=True)
    assert record.exact
    assert record.inputs.versions["gpu"] == "GPU of memory sm89"
    with Runtime.load(tiny_copy) as runtime:
        drafted, control = (runtime.generate([5, 6, 7], budget=budget, max_new_tokens=24) for budget in (3, 0))
        assert drafted.token_ids == control.token_ids
        assert drafted.exact
    monkeypatch.setattr(gpu_double.CudaRuntime, "cudaDriverGetVersion", lambda _: (gpu_double.Status(0), 14000))
    with pytest.raises(SpotDeployError, match="built with other versions") as caught:
        Runtime.load(tiny_copy)
    assert "--provider cuda" in caught.value.fix


def test_a_gpu_provider_needs_cuda_python(gpu, monkeypatch):
    def lacking():
        raise SpotDeployError("cuda-missing", "cuda-python is not installed", fix="pip install cuda-bindings")

    monkeypatch.setattr(cuda, "_runtime", lacking)
    with pytest.raises(SpotDeployError, match="cuda-python is not installed"):
        ort.require_device("cuda")
