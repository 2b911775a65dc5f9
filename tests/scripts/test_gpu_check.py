"""The check for machines with a GPU, on a machine without: what runs is checked, what does not is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def report(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    (folder / "prompts.jsonl").write_text('{"prompt": "one two three"}\n', encoding="utf-8")
    command = [
        sys.executable,
        "-P",
        SCRIPT,
        tiny_bundle,
        "--prompts",
        folder / "prompts.jsonl",
        "-o",
        folder / "r.json",
    ]
    command += ["--limit", "1", "--max-new-tokens", "16", "--only", "onnxruntime", "tensorrt-rtx", "tensorrt"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    page = (folder / "r.html").read_text(encoding="utf-8")
    return json.loads((folder / "r.json").read_text(encoding="utf-8")), page, done.stdout


def test_what_runs_is_proven_and_timed(report):
    document, page, said = report
    entry = next(e for e in document["engines"] if e["name"] == "onnxruntime cpu f32")
    assert len(entry["gates"]) == 6
    assert all(gate["passed"] for gate in entry["gates"])
    assert [row["budget"] for row in entry["decoding"]] == [0, 3, 8]
    assert all(row["identical"] for row in entry["decoding"])
    free, *drafted = entry["decoding"]
    assert all(row["commits"] == free["commits"] and row["passes"] <= free["passes"] for row in drafted)
    assert entry["curve"]["curves"]["half"]["1"]["c"] == 1
    assert "6 of 6 gates passed, exact" in said
    assert "0 gates failed, 0 engines failed" in said
    assert "speculative" in page or "equality" in page


def test_what_does_not_run_says_why(report):
    document, page, said = report
    reasons = {e["name"]: e["error"]["what"] for e in document["engines"] if "error" in e}
    assert len(reasons) == 6
    assert "cannot run on cuda here" in reasons["onnxruntime cuda f32"]
    assert "no NVIDIA driver" in reasons["tensorrt-rtx bf16 packed"]
    assert "not installed" in reasons["tensorrt f32 split"]
    assert "no GPU: this machine has no NVIDIA driver" in page
    assert all(reason in said for reason in reasons.values())
