"""TensorRT: real parses and real ahead-of-time builds by TensorRT for RTX, which needs no GPU for either."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import gpu_double
import onnx
import pytest
from onnx import TensorProto, helper

from spot_deploy import SpotDeployError
from spot_deploy.engines import backends, cuda, trt
from spot_deploy.engines.contracts import LAYOUTS, Compiled, GraphSignature, TensorSpec, order_signature, target_role
from spot_deploy.engines.files import sha256
from spot_deploy.engines.profiles import Limits
from spot_deploy.runtime.manifest import read_manifest

rtx = pytest.importorskip("tensorrt_rtx")

CAPABILITIES = ("sm86", "sm89", "sm120")
PRECISIONS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
ROLES = {target_role(layout, precision): (layout, precision) for layout in LAYOUTS for precision in PRECISIONS}
LIMITS = Limits(block_width=8, buckets=(16,), budgets=(0, 3, 8), budget=3, requests=1, prefill_positions=64, window=8)


def jobs(bundle):
    manifest = read_manifest(bundle)
    for role in ROLES:
        file, signature = manifest.graph(role)
        yield trt.target_job(role, bundle / file, signature, manifest.decoding.shape, LIMITS)
    file, signature = manifest.graph("order")
    yield trt.order_job(bundle / file, signature, LIMITS)


@pytest.fixture(scope="module")
def built(tiny_bundle, tmp_path_factory):
    """Every graph of the tiny bundle, for three capabilities at once: the folder of engines, and the facts."""
    folder = tmp_path_factory.mktemp("engines")
    said = []
    facts = trt.RTX.build(list(jobs(tiny_bundle)), folder, capabilities=("8.6", "8.9", "12.0"), say=said.append)
    assert [line.split()[1] for line in said] == [*ROLES, "order"]
    return folder, facts


@pytest.fixture
def order(tiny_bundle):
    return list(jobs(tiny_bundle))[-1]


def build(job, folder, **options):
    return trt.RTX.build([job], folder, capabilities=("sm89",), **options)


def refused(job, folder, match):
    with pytest.raises(SpotDeployError, match=match) as caught:
        build(job, folder)
    assert not list(folder.glob("*.engine"))
    return caught.value


@pytest.mark.parametrize("role", [*ROLES, "order"])
def test_every_graph_builds_for_three_capabilities(role, built, tiny_bundle):
    folder, facts = built
    manifest = read_manifest(tiny_bundle)
    graph, path = facts["graphs"][role], folder / f"{role}.engine"
    assert facts["package"] == "tensorrt-rtx"
    assert facts["versions"] == {"tensorrt-rtx": rtx.__version__}
    assert facts["capabilities"] == list(CAPABILITIES)
    assert graph["engine"] == path.name
    assert graph["bytes"] == path.stat().st_size > 500_000
    assert graph["sha256"] == sha256(path)
    assert graph["onnx_sha256"] == {f.path: f.sha256 for f in manifest.files}[graph["onnx"]]
    assert graph["seconds"] > 0
    assert graph["flags"] == ["REQUIRE_USER_ALLOCATION"]  # no TF32: float32 means float32
    signature = manifest.graph(role)[1]
    for kind in ("inputs", "outputs"):
        specs = {t.name: t for t in getattr(signature, kind)}
        assert [t["name"] for t in graph[kind]] == list(specs)
        for tensor in graph[kind]:
            spec = specs[tensor["name"]]
            assert tensor["dtype"] == spec.dtype
            assert [d == -1 for d in tensor["shape"]] == [isinstance(d, str) for d in spec.shape]


@pytest.mark.parametrize("role", ROLES)
def test_networks_are_what_the_layout_and_precision_say(role, built):
    (layout, precision), graph = ROLES[role], built[1]["graphs"][role]
    fused = layout == "packed" and precision != "f32"
    assert (
        graph["layers"].get("ATTENTION_INPUT", 0) == graph["layers"].get("ATTENTION_OUTPUT", 0) == (2 if fused else 0)
    )
    assert graph["layers"]["TOPK"] == 1
    floats = set(graph["dtypes"]) & {"float32", "float16", "bfloat16"}
    assert floats == {"float32", PRECISIONS[precision]}  # the head is float32 everywhere
    assert list(graph["profiles"]) == ["prefill", "draft-free", "speculate"]
    shapes = graph["profiles"]["speculate"]
    assert shapes["input_ids"] == [[1, 1, 8], [1, 4, 8], [1, 9, 8]]
    assert shapes["past_k.0"] == [[1, 2, 16, 16]] * 3


def test_more_capabilities_make_a_larger_engine(order, built, tmp_path):
    assert build(order, tmp_path)["graphs"]["order"]["bytes"] < built[1]["graphs"]["order"]["bytes"]


def polygraphy_says(path, folder):
    """NVIDIA's own tool on a graph, by its own reading of the parser's answers; it writes into its folder."""
    code = "import sys, polygraphy.tools; sys.exit(polygraphy.tools.main())"
    command = [sys.executable, "-P", "-c", code, "inspect", "capability", str(path)]
    environment = os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout


@pytest.mark.parametrize("role", ["target-packed-bf16", "target-split-f16", "order"])
def test_polygraphy_finds_nothing_unsupported(role, tiny_bundle, tmp_path):
    said = polygraphy_says(tiny_bundle / read_manifest(tiny_bundle).graph(role)[0], tmp_path)
    assert "Graph is fully supported by TensorRT" in said


def test_polygraphy_finds_what_is_unsupported(tmp_path):
    said = polygraphy_says(unsupported(tmp_path).path, tmp_path)
    assert "xor_it" in said
    assert "fully supported" not in said


def unsupported(folder):
    """A graph with an operator that no TensorRT parser takes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 4]) for name in "xy")
    node = helper.make_node("BitwiseXor", ["x", "x"], ["y"], name="xor_it")
    graph = helper.make_graph([node], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "x.onnx")
    specs = (TensorSpec("x", "int64", ("N", 4)),), (TensorSpec("y", "int64", ("N", 4)),)
    return trt.BuildJob("x", folder / "x.onnx", GraphSignature(*specs), {"a": {"x": ((1, 4), (2, 4), (3, 4))}})


def test_an_unsupported_operator_is_named(tmp_path):
    error = refused(unsupported(tmp_path), tmp_path, "cannot read x.onnx")
    assert "node xor_it (BitwiseXor): " in error.seen


def test_a_missing_or_damaged_file_is_an_error(order, tmp_path):
    refused(replace(order, path=tmp_path / "none.onnx"), tmp_path, "cannot read none.onnx")
    (tmp_path / "half.onnx").write_bytes(order.path.read_bytes()[:5000])
    refused(replace(order, path=tmp_path / "half.onnx"), tmp_path, "cannot read half.onnx")


def test_float32_attention_is_refused_with_the_builders_words(tmp_path):
    """Why float32 graphs stay at opset 20."""
    names = ("q", "k", "v")
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2, "N", 16]) for n in names]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, "N", 16])
    graph = helper.make_graph([helper.make_node("Attention", names, ["y"], name="a")], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.save(model, tmp_path / "a.onnx")
    specs = [TensorSpec(n, "float32", (1, 2, "N", 16)) for n in (*names, "y")]
    shapes = dict.fromkeys(names, ((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 16, 16)))
    job = trt.BuildJob("a", tmp_path / "a.onnx", GraphSignature(tuple(specs[:3]), tuple(specs[3:])), {"only": shapes})
    assert "not supported by a dedicated kernel" in refused(job, tmp_path, "did not give an engine for a").seen


def test_turing_has_no_float32_products(order, tmp_path):
    with pytest.raises(SpotDeployError, match="did not give an engine") as caught:
        trt.RTX.build([order], tmp_path, capabilities=("7.5",))
    assert "FP32 GEMM is not supported" in caught.value.seen


CHANGES = {
    "falls": lambda least, best, most: (most, best, least),
    "fixed": lambda *shapes: tuple((*shape[:-1], shape[-1] + 1) for shape in shapes),
    "rank": lambda *shapes: tuple((*shape, 1) for shape in shapes),
    "negative": lambda *shapes: tuple((-5, *shape[1:]) for shape in shapes),
}
REASONS = {
    "falls": "MIN<=OPT<=MAX",
    "fixed": "profile 0",
    "rank": "dimensions",
    "negative": "inconsistent",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_profiles_that_cannot_be(kind, order, tmp_path):
    shapes = {name: CHANGES[kind](*three) for name, three in order.profiles["order"].items()}
    error = refused(replace(order, profiles={"mine": shapes}), tmp_path, "tensorrt-rtx (refuses|did not give)")
    assert REASONS[kind] in error.seen
    assert "cudaError" not in error.seen  # the machine lacks a driver, which is not the reason


def test_without_a_profile(order, tmp_path):
    error = refused(replace(order, profiles={}), tmp_path, "did not give an engine")
    assert "no optimization profile" in error.seen


def test_the_network_must_be_the_one_described(order, tmp_path):
    refused(replace(order, signature=order_signature(9)), tmp_path, "not the one the manifest describes")
    renamed = tuple(replace(t, name="log_p") for t in order.signature.outputs)
    signature = replace(order.signature, outputs=renamed)
    refused(replace(order, signature=signature), tmp_path, "not the one the manifest describes")
    half = tuple(replace(t, dtype="float16") for t in order.signature.outputs)
    refused(replace(order, signature=replace(order.signature, outputs=half)), tmp_path, "not the one the manifest")
    freer = tuple(replace(t, shape=tuple("L" if d == 8 else d for d in t.shape)) for t in order.signature.inputs)
    error = refused(replace(order, signature=replace(order.signature, inputs=freer)), tmp_path, "features of order is")
    assert "'L'" in error.what


def test_all_engines_or_none(order, tmp_path):
    (tmp_path / "order.engine").write_text("old")
    with pytest.raises(SpotDeployError, match="did not give an engine for second"):
        trt.RTX.build([order, replace(order, role="second", profiles={})], tmp_path, capabilities=("sm89",))
    assert (tmp_path / "order.engine").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["order.engine"]


REFUSALS = [
    ("Builder", "create_network", None),
    ("Builder", "create_builder_config", None),
    ("Builder", "create_optimization_profile", None),
    ("Builder", "build_serialized_network", None),
    ("IBuilderConfig", "set_compute_capability", False),
    ("IBuilderConfig", "add_optimization_profile", -1),
    ("OnnxParser", "parse_from_file", False),
]


@pytest.mark.parametrize(("owner", "name", "answer"), REFUSALS)
def test_every_refusal_is_an_error(owner, name, answer, order, tmp_path, monkeypatch):
    monkeypatch.setattr(getattr(rtx, owner), name, lambda *_: answer)
    assert refused(order, tmp_path, "tensorrt-rtx (did not give|refuses|cannot read)").exit_code == 1


@pytest.mark.parametrize("name", ["Builder", "OnnxParser"])
def test_constructors_that_fail_are_errors(name, order, tmp_path, monkeypatch):
    def fails(*_):
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(rtx, name, fails)
    assert "nullptr" in refused(order, tmp_path, "did not give a (builder|parser)").seen


def test_capabilities_by_name_and_by_number():
    assert trt.RTX.choose_capabilities(["12.0", "8.6", "SM89", "sm_86"]) == CAPABILITIES
    assert set(CAPABILITIES) < set(trt.RTX.capabilities())
    assert all(re.fullmatch(r"sm\d+", name) for name in trt.RTX.capabilities())
    assert trt.FULL.choose_capabilities([]) == trt.FULL.capabilities() == ()


@pytest.mark.parametrize("wanted", [["9.0"], ["8.6", "sm1000"], ["current"], [""], []], ids=str)
def test_unknown_capabilities_are_a_usage_error_that_lists_the_known(wanted, order, tmp_path):
    with pytest.raises(SpotDeployError) as caught:
        trt.RTX.build([order], tmp_path, capabilities=wanted)
    assert caught.value.exit_code == 2
    assert "sm86, sm89" in caught.value.wanted
    with pytest.raises(SpotDeployError, match="GPU that is present") as caught:
        trt.FULL.choose_capabilities(["8.6"])
    assert caught.value.exit_code == 2


def test_timing_cache_is_kept_reused_and_healed(order, tmp_path):
    caches, warned = tmp_path / "caches", []

    def state():
        return build(order, tmp_path, timing_caches=caches, warn=warned.append)["timing_cache"]["state"]

    assert state() == "new"
    (path,) = caches.glob("timing-*.cache")
    kept = path.read_bytes()
    assert rtx.__version__.encode() in kept
    assert b"sm89" in kept.partition(b"\n")[0]
    assert state() == "reused"
    assert warned == []
    path.write_bytes(bytes(500))
    assert state() == "damaged"
    assert "damaged" in warned.pop()
    assert state() == "reused"
    path.write_bytes(kept.replace(b"sm89", b"sm86"))
    assert state() == "foreign"
    assert "foreign" in warned.pop()
    trt.RTX.build([order], tmp_path, capabilities=("sm120",), timing_caches=caches)
    assert len(list(caches.glob("timing-*.cache"))) == 2


class Entries:
    """TensorRT's timing cache with entries in it, which TensorRT for RTX never has."""

    def __init__(self, data=b""):
        self.entries = set(data.split())

    def combine(self, other, ignore_mismatch):
        assert not ignore_mismatch
        self.entries |= other.entries

    def serialize(self):
        return b" ".join(sorted(self.entries))


class Config:
    """What a builder configuration does with a timing cache; a build learns `learns`."""

    def __init__(self, learns=b"", refuses=()):
        self.learns, self.refuses, self.cache = learns, refuses, None

    def create_timing_cache(self, data):
        return None if data in self.refuses else Entries(data)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        self.cache.entries.add(self.learns)
        return self.cache


def test_builds_side_by_side_add_to_one_timing_cache(tmp_path):
    one, two = (trt._TimingCache(tmp_path, "key", pytest.fail) for _ in range(2))
    for cache, learns in ((one, b"a"), (two, b"b"), (one, b"c")):
        config = Config(learns)
        cache.attach(config)
        cache.collect(config)
    third = Config(b"d")
    cache = trt._TimingCache(tmp_path, "key", pytest.fail)
    cache.attach(third)
    assert third.cache.entries == {b"a", b"b", b"c"}
    assert cache.facts() == {"state": "reused", "bytes": 5}


DAMAGE = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "other-format": lambda data: data.replace(b"cache 1", b"cache 9"),
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "no-entries": lambda data: data.partition(b"\n")[0],
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_timing_cache_is_healed(change, tmp_path):
    def use(learns, warn):
        cache, config = trt._TimingCache(tmp_path, "key", warn), Config(learns)
        cache.attach(config)
        cache.collect(config)
        return cache

    path, warned = use(b"a", pytest.fail)._path, []
    path.write_bytes(change(path.read_bytes()))
    assert use(b"b", warned.append).facts() == {"state": "damaged", "bytes": 1}
    assert len(warned) == 1
    assert use(b"c", pytest.fail).facts() == {"state": "reused", "bytes": 3}


def test_a_timing_cache_that_tensorrt_refuses_is_started_anew(tmp_path):
    first = trt._TimingCache(tmp_path, "key", pytest.fail)
    config = Config(b"a")
    first.attach(config)
    first.collect(config)
    warned = []
    second = trt._TimingCache(tmp_path, "key", warned.append)
    config = Config(b"b", refuses=(b"a",))
    second.attach(config)
    assert len(warned) == 1
    second.collect(config)
    assert trt._TimingCache(tmp_path, "key", pytest.fail)._data == b"b"


def test_the_timing_cache_waits_for_who_writes_it(tmp_path):
    cache, config = trt._TimingCache(tmp_path, "key", pytest.fail), Config(b"a")
    cache.attach(config)
    with cache._path.with_name(cache._path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=cache.collect, args=(config,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert not cache._path.exists()
    thread.join(10)
    assert cache._path.is_file()


class Driver:
    def __init__(self, status):
        self.status = status

    def cuInit(self, flags):  # noqa: N802 - NVIDIA's name
        assert flags == 0
        return self.status


def no_driver(_name):
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (no_driver, "no NVIDIA driver"),
        (lambda _: Driver(100), "cuInit returned 100"),
    ],
)
@pytest.mark.parametrize("backend", [trt.RTX, trt.FULL], ids=lambda b: b.name)
def test_running_says_what_is_missing(load, words, backend, order, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", load)
    for opener in (backend.Target, backend.OrderModel):
        with pytest.raises(SpotDeployError, match=words) as caught:
            opener(order.path, order.signature, 1, "bf16", "gpu", Compiled(""))
        assert caught.value.exit_code == 4
        assert "\n" not in caught.value.what


def test_running_here_is_refused_through_the_common_door(order):
    options = {"threads": 1, "precision": "bf16", "compiled": Compiled("")}
    with pytest.raises(SpotDeployError) as caught:
        backends.open_target("tensorrt-rtx", order.path, order.signature, **options)
    assert caught.value.exit_code == 4


def test_full_tensorrt_looks_for_a_driver_before_it_makes_a_builder(order, tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    monkeypatch.setattr(trt.FULL, "_import", lambda: rtx)
    monkeypatch.setattr(rtx, "Builder", pytest.fail)
    with pytest.raises(SpotDeployError, match="cannot build here: this machine has no NVIDIA driver") as caught:
        trt.FULL.build([order], tmp_path)
    assert caught.value.exit_code == 4


@pytest.fixture
def full(monkeypatch):
    """TensorRT on a machine with a GPU, with the other package's module in its place."""
    monkeypatch.setattr(cuda, "missing_driver", lambda: None)
    monkeypatch.setattr(cuda, "_runtime", gpu_double.CudaRuntime)
    monkeypatch.setattr(trt.FULL, "_import", lambda: rtx)
    return trt.FULL


def test_full_tensorrt_takes_the_same_path(full, order, tmp_path):
    """No capability is set, the rest is the same."""
    facts = full.build([order], tmp_path)
    assert facts["capabilities"] == []
    assert facts["graphs"]["order"]["bytes"] == (tmp_path / "order.engine").stat().st_size


def test_portability_that_tensorrt_does_not_take_is_an_error(full, order, tmp_path):
    """Here a package that has none at all: it says so in a log line and goes on, or gives no plan."""
    with pytest.raises(SpotDeployError, match="refuses the compatibility ampere-plus for order"):
        full.build([order], tmp_path, portable=("ampere-plus",))
    with pytest.raises(SpotDeployError, match="did not give an engine for order") as caught:
        full.build([order], tmp_path, portable=("version",))
    assert caught.value.code == "engine-build"
    assert not list(tmp_path.glob("*.engine"))


def test_an_engine_without_weights_cannot_be_compiled_without_a_gpu(order, tmp_path):
    error = refused_with(order, tmp_path, strip=True)
    assert "CUDA" in error.seen
    assert not list(tmp_path.glob("*.engine"))


def refused_with(job, folder, **options):
    with pytest.raises(SpotDeployError, match="did not give an engine") as caught:
        build(job, folder, **options)
    return caught.value


@pytest.mark.parametrize(
    ("backend", "portable", "words"),
    [
        ("tensorrt-rtx", ("version",), "has no portable engines"),
        ("tensorrt-rtx", ("same-sm",), "has no portable engines"),
        ("tensorrt", ("same-sm", "ampere-plus"), "exclude each other"),
        ("onnxruntime", ("version",), "there is no engine file to make portable"),
    ],
)
def test_portability_that_cannot_be_is_a_usage_error(backend, portable, words, monkeypatch):
    monkeypatch.setattr(trt.TensorRT, "require", lambda _: None)
    with pytest.raises(SpotDeployError, match=words) as caught:
        backends.choose_portability(backend, portable, False)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "extra"), [("tensorrt-rtx", "[rtx]"), ("tensorrt", "[tensorrt]")])
def test_missing_packages_name_the_extra(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SpotDeployError, match="not installed") as caught:
        backends.require(name)
    assert caught.value.exit_code == 4
    assert f"spot-deploy{extra}" in caught.value.fix
    assert ("pypi.nvidia.com" in caught.value.fix) == (name == "tensorrt")


def test_a_package_without_its_libraries_is_missing_too(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("raise ImportError('libnvonnxparser.so.11: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(trt._INSTALL, "half_installed", trt._INSTALL["tensorrt"])
    broken = trt.TensorRT("half_installed")
    with pytest.raises(SpotDeployError, match="not installed") as caught:
        broken.require()
    assert caught.value.exit_code == 4
    assert "libnvonnxparser" in caught.value.seen


def test_defaults_of_the_backends():
    assert backends.default_layout("tensorrt-rtx") == "packed"
    assert backends.default_layout("onnxruntime") == backends.default_layout("openvino") == "split"
    assert backends.choose_precision("tensorrt-rtx", None) == "bf16"
    assert [backends.choose_precision("tensorrt-rtx", p) for p in ("f32", "f16")] == ["f32", "f16"]
