"""Opening bundles: every kind of damage is one clear error, and nothing is written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spot_deploy import Runtime, SpotDeployError
from spot_deploy.runtime.bundle import bundle_id, open_bundle
from spot_deploy.runtime.manifest import SCHEMA_VERSION, Decoding, default_buckets, read_manifest, to_document


def snapshot(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit(folder, change):
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_manifest_survives_a_round_trip(tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    document = json.loads(json.dumps(to_document(manifest)))
    assert document == json.loads((tiny_bundle / "manifest.json").read_text())
    assert open_bundle(tiny_bundle).manifest == manifest


FILES = [
    "weights.safetensors",
    "target-split.onnx",
    "target-packed.onnx",
    "order.onnx",
    "tokenizer.json",
    "golden.json",
]


@pytest.mark.parametrize("name", FILES)
def test_missing_file(tiny_copy, name):
    (tiny_copy / name).unlink()
    before = snapshot(tiny_copy)
    with pytest.raises(SpotDeployError, match=name) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "bundle-file-missing"
    assert snapshot(tiny_copy) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_flipped_byte(tiny_copy, name, place):
    path = tiny_copy / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * place) if place >= 0 else -1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpotDeployError, match=name) as caught:
        Runtime.load(tiny_copy)
    assert (caught.value.code, caught.value.exit_code) == ("bundle-file-changed", 1)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(tiny_copy, name):
    os.truncate(tiny_copy / name, 10)
    with pytest.raises(SpotDeployError, match=name) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "bundle-file-size"


def test_link_out_of_the_bundle(tiny_copy, tmp_path):
    shutil.move(tiny_copy / "order.onnx", tmp_path / "elsewhere.onnx")
    (tiny_copy / "order.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "bundle-file-link"


BROKEN = {
    "not-json": b"{",
    "not-utf8": b"\xff\xfe{}",
    "duplicate-key": b'{"format": "spot-deploy-bundle", "format": "spot-deploy-bundle"}',
    "nan": b'{"format": NaN}',
    "a-list": b"[]",
    "other-format": b'{"format": "onnx"}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_manifest_that_is_none(tiny_copy, content):
    (tiny_copy / "manifest.json").write_bytes(content)
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code in ("manifest", "manifest-format")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("version", "fix"),
    [(SCHEMA_VERSION + 1, "upgrade"), (1, "export"), (0, "export"), ("1", "export"), (None, "export")],
)
def test_wrong_schema(tiny_copy, version, fix):
    edit(tiny_copy, lambda d: d.update(schema_version=version))
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "manifest-schema"
    assert fix in caught.value.fix


CONTRADICTIONS = {
    "path-up": lambda d: d["files"][0].update(path="../x"),
    "path-absolute": lambda d: d["files"][0].update(path="/etc/passwd"),
    "listed-twice": lambda d: d["files"].append(d["files"][0]),
    "graph-unlisted": lambda d: d["graphs"]["order"].update(file="other.onnx"),
    "graph-missing": lambda d: d["graphs"].pop("order"),
    "signature": lambda d: d["graphs"]["order"]["signature"]["inputs"][0].update(dtype="float16"),
    "vocab": lambda d: d["decoding"]["shape"].update(vocab=100),
    "layers-huge": lambda d: d["decoding"]["shape"].update(layers=2**70),
    "prefill-huge": lambda d: d["decoding"].update(prefill_positions=2**70),
    "mask-is-stop": lambda d: d["decoding"].update(stop_ids=[d["decoding"]["mask_id"]]),
    "buckets": lambda d: d["decoding"].update(buckets=[8]),
    "confidence": lambda d: d["decoding"].update(confidence="raw"),
    "field-missing": lambda d: d["decoding"].pop("mask_id"),
    "wrong-type": lambda d: d["decoding"].update(block_width="8"),
    "bool-for-int": lambda d: d["decoding"].update(block_width=True),
    "gamma": lambda d: d["speculation"].update(gamma=-1),
    "budgets": lambda d: d["speculation"].update(budgets=[0, 3, 500]),
    "source": lambda d: d.update(source={}),
    "section-missing": lambda d: d.pop("speculation"),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_manifest_that_contradicts_itself(tiny_copy, change):
    edit(tiny_copy, change)
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "manifest-invalid"


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_manifest_value_is_an_error_or_harmless(tiny_bundle, tmp_path_factory, data):
    """Whatever single value is replaced, reading raises our error or gives a valid manifest; no other exception."""
    document = json.loads((tiny_bundle / "manifest.json").read_text())
    decoding = read_manifest(tiny_bundle).decoding
    node, path = document, []
    while isinstance(node, dict | list) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    parent, key = path[-1]
    parent[key] = data.draw(st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "manifest.json").write_text(json.dumps(document))
    try:
        manifest = read_manifest(folder)
    except SpotDeployError:
        return
    assert isinstance(manifest.decoding, Decoding)
    if path[0][1] != "decoding":
        assert manifest.decoding == decoding


def test_manifest_that_was_edited_but_makes_sense(tiny_copy):
    edit(tiny_copy, lambda d: d["decoding"].update(stop_ids=[5]))
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "bundle-id"


def reseal(folder):
    """Make checksums fit what is there, as an attacker or a careless script would."""
    document = json.loads((folder / "manifest.json").read_text())
    for entry in document["files"]:
        data = (folder / entry["path"]).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    document["bundle_id"] = bundle_id(document)
    (folder / "manifest.json").write_text(json.dumps(document))
    record = json.loads((folder / "engines" / "onnxruntime" / "engine.json").read_text())
    record["bundle_id"] = document["bundle_id"]
    (folder / "engines" / "onnxruntime" / "engine.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("golden.json", b"[]"),
        ("golden.json", b'{"encodings": [{"text": 1, "ids": []}], "chats": [], "traces": []}'),
        ("golden.json", b'{"encodings": [{"text": "the", "ids": [1]}], "chats": [], "traces": []}'),
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"{% for %}"),
        ("tokenizer.json", b"{}"),
        ("target-split.onnx", b"onnx"),
    ],
    ids=ascii,
)
def test_content_that_is_wrong_under_right_checksums(tiny_copy, name, content):
    (tiny_copy / name).write_bytes(content)
    reseal(tiny_copy)
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.fix


def test_other_things_that_are_no_bundle(tmp_path, tiny_checkpoint):
    with pytest.raises(SpotDeployError, match="there is no"):
        Runtime.load(tmp_path / "nothing")
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_checkpoint)
    assert "spot-deploy export" in caught.value.fix


@given(width=st.integers(1, 64), blocks=st.integers(1, 2000))
def test_default_buckets_hold_every_prefix(width, blocks):
    buckets = default_buckets(width, width * blocks)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] >= width * (blocks - 1)
    assert all(b % width == 0 for b in buckets)
