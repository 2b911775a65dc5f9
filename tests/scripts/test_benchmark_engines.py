"""The engine benchmark at a tiny size: what its results file holds and which of its numbers must agree; never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_engines.py"
SMALL = (
    "--threads",
    "1",
    "--curve-repeats",
    "1",
    "--states",
    "1,2,4",
    "--random-states",
    "1,2",
    "--repeats",
    "1",
    "--precisions",
    "f32",
)


def benchmark(output, *arguments):
    command = [sys.executable, "-P", SCRIPT, *SMALL, "-o", output, *arguments]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"prompt": "the cat sat on the mat"}\n{"prompt": "one two three"}\n', encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def results(tiny_bundle, tiny_checkpoint, prompts, tmp_path_factory):
    return benchmark(
        tmp_path_factory.mktemp("benchmark") / "results.json",
        *(tiny_bundle, "--checkpoint", tiny_checkpoint, "--prompts", prompts),
        "--max-new-tokens", "24", "--temperatures", "0,1",
    )  # fmt: skip


def test_what_was_run_is_told(results):
    document, _ = results
    assert document["threads"] == 1
    assert {"onnxruntime", "openvino", "torch", "transformers"} <= set(document["versions"])
    assert {"date", "command", "commit", "machine", "peak_memory_bytes"} <= set(document)
    (target,) = document["targets"]
    assert {e["probed_exact_budget"] for e in target["engines"].values()} == {8}
    names = [(part["temperature"], part["ignore_eos"]) for part in target["decode"]]
    assert names == [(0.0, False), (0.0, True), (1.0, False), (1.0, True)]


def test_drafts_change_no_token_and_counts_agree(results):
    for part in results[0]["targets"][0]["decode"]:
        control = {row["engine"]: row for row in part["rows"] if row["budget"] == 0}
        for row in part["rows"]:
            assert row["passes"] + row["accepted"] == row["commits"] or row["budget"] is None
            if row["budget"] is not None:
                assert row["identical"]
                assert row["exact"]
                assert row["tokens"] == control[row["engine"]]["tokens"]
                assert sum(row["shares"].values()) == pytest.approx(1)
            if row["budget"]:
                assert row["passes"] < control[row["engine"]]["passes"]
        methods = [(row["engine"], row["method"]) for row in part["rows"]]
        assert ("openvino f32", "SPOT D8") in methods
        assert (("torch f32", "plain loop") in methods) == (part["temperature"] == 0)


def test_the_plain_loop_commits_what_draft_free_decoding_commits(results):
    for part in results[0]["targets"][0]["decode"]:
        for row in part["rows"]:
            for difference in row.get("differences", []):
                assert difference is None or difference["near_tie"]


def test_curves_and_what_follows_from_them(results):
    target = results[0]["targets"][0]
    for curve in target["curves"]:
        assert set(curve["curves"]) == {"half", "all"}
        for points in curve["curves"].values():
            assert list(points) == ["1", "2", "4"]
            assert points["1"]["c"] == 1
        assert set(curve["ceiling"]) == {"3"}  # nothing was measured for budget 8
    for part in target["decode"]:
        bounded = {row["method"] for row in part["rows"] if "oracle_bound" in row}
        assert bounded == {"SPOT D3"}


def test_a_table_is_printed(results):
    assert "SPOT D3" in results[1]
    assert "c(2)" in results[1]


def test_bundles_and_random_targets_in_one_run(tiny_bundle, prompts, tmp_path):
    document, _ = benchmark(
        tmp_path / "results.json",
        *(tiny_bundle, "--prompts", prompts, "--max-new-tokens", "24", "--limit", "1", "--modes", "eos"),
        *("--random", "tiny", "--parts", "curves,decode", "--widths", "8"),
        *("--backends", "onnxruntime", "--budgets", "0,3"),
    )
    assert [target["name"] for target in document["targets"]] == [tiny_bundle.name, "random tiny"]
    random = document["targets"][1]
    assert list(random["curves"][0]["curves"]["half"]) == ["1", "2"]
    (part,) = random["decode"]
    methods = [row["method"] for row in part["rows"]]
    assert part["condition"].startswith("fixed length")
    assert methods == ["draft-free", "SPOT D3", "oracle D3"]
    assert all(row["identical"] for row in part["rows"])


def test_curves_of_a_random_target(tmp_path):
    output = tmp_path / "results.json"
    arguments = ("--random", "tiny", "--parts", "curves", "--widths", "4,16", "--work", tmp_path)
    document, _ = benchmark(output, *arguments)
    (target,) = document["targets"]
    seen = [(curve["engine"], curve["width"]) for curve in target["curves"]]
    assert seen == [(engine, width) for engine in ("onnxruntime f32", "openvino f32") for width in (4, 16)]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # the weights are gone
