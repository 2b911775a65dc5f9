"""The benchmarks of export and of expert forms at tiny sizes: what they find must agree; never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script, *arguments):
    command = [sys.executable, "-P", SCRIPTS / script, *arguments]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_export_of_a_synthetic_checkpoint(tmp_path):
    output = tmp_path / "results.json"
    run("benchmark_export.py", "tiny", "--work", tmp_path, "-o", output)
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["exit_code"] == 0
    # Weights once, beside graphs, tokenizer and golden pass.
    assert document["checkpoint_bytes"] < document["bundle_bytes"] < document["checkpoint_bytes"] + 8_000_000
    assert document["peak_resident_bytes"] >= document["peak_anonymous_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_forms_of_experts_agree(tmp_path):
    output = tmp_path / "results.json"
    sizes = ("--hidden", "64", "--inner", "32", "--experts", "8", "--per-token", "2", "--rows", "18", "--repeats", "1")
    run("benchmark_moe.py", *sizes, "--threads", "1", "--work", tmp_path, "-o", output)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    found = {(row["form"], row["backend"]): row for row in rows}
    for backend in ("onnxruntime", "openvino"):
        assert found["dense", backend]["independent"]
    assert found["dense", "onnxruntime"]["tensorrt_parser"] in ("yes", "not installed")
    for row in rows:
        assert "error" in row or row["difference_to_dense"] < 1e-4
    assert "error" not in found["sorted", "onnxruntime"]
