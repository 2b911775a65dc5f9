"""ONNX Runtime's GPU providers: IO binding, with the CPU in the place of the GPU and its memory."""

from __future__ import annotations

from dataclasses import asdict

import gpu_double
import numpy as np
import pytest

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.engines import cuda, ort
from spot_deploy.engines.profiles import Limits, spanning, target_profiles
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


def test_the_tensorrt_provider_is_told_all_shapes(tiny_bundle):
    """One range over all profiles, for every input of both graphs, in the words of its options."""
    manifest = read_manifest(tiny_bundle)
    limits = Limits(8, buckets=(16, 32), budgets=(0, 3), budget=3, requests=2, prefill_positions=24, window=8)
    profiles = target_profiles(limits)
    sizes = spanning([asdict(p) for p in profiles])
    for role in ("target-split", "order"):
        signature = manifest.graph(role)[1]
        options = ort.provider_options("tensorrt", signature, sizes)
        found = {t.name: [] for t in signature.inputs}
        for option in ort.SHAPES:
            for text in options[option].split(","):
                name, _, shape = text.partition(":")
                found[name].append(tuple(map(int, shape.split("x"))))
        for least, best, most in found.values():
            assert all(a <= b <= c for a, b, c in zip(least, best, most, strict=True))
        if role == "order":
            assert found["depth"] == [(1,), (4,), (8,)]
            continue
        for profile in profiles:
            for name, (least, _, most) in profile.shapes(manifest.decoding.shape).items():
                assert all(a <= b for a, b in zip(found[name][0], least, strict=True))
                assert all(a >= b for a, b in zip(found[name][2], most, strict=True))
    assert ort.provider_options("cuda", signature, None) == {"use_tf32": "0"}


def test_a_gpu_provider_needs_cuda_python(gpu, monkeypatch):
    def lacking():
        raise SpotDeployError("cuda-missing", "cuda-python is not installed", fix="pip install cuda-bindings")

    monkeypatch.setattr(cuda, "_runtime", lacking)
    with pytest.raises(SpotDeployError, match="cuda-python is not installed"):
        ort.require_device("cuda")
