"""`bench` and `report`: what is measured is what decoding would do, interruptions lose nothing, tables say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spot_deploy import Runtime, SpotDeployError
from spot_deploy.bench.config import BenchConfig, Graph, Timing, Variant, read_config, show_config
from spot_deploy.bench.grading import grade
from spot_deploy.bench.measure import Bench, Cell, Remembering, load_prompts, read_results
from spot_deploy.bench.page import write_report
from spot_deploy.bench.results import Results, View, tables
from spot_deploy.cli.main import main
from spot_deploy.engines.errors import USAGE

ORACLES = ("position", "token t=2", "joint t=1", "joint t=2", "joint t=32")
RIVALS = ("SPOT", "SPOT chain", "free chain", "confidence tree", "draft graph")
WORDS = ("one two three", "two one", "three three one", "one")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    for name, words in (("prompts", WORDS), ("others", ("two two two", "three"))):
        lines = [json.dumps({"prompt": w, "kind": "ab"[n % 2], "answer": "7"}) + "\n" for n, w in enumerate(words)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def config(tiny_bundle, prompts):
    return BenchConfig(
        bundle=tiny_bundle,
        chat=False,
        prompts=str(prompts / "prompts.jsonl"),
        per_kind=1,
        methods=(*RIVALS, *ORACLES),
        budgets=(2, 5),
        gammas=(0.0, 0.1),
        temperatures=(0.0, 1.0),
        lengths=(20, 40),
        seeds=(3, 4),
        verifiers=("coupled", "uncoupled", "rejection", "greedy"),
        variants=(Variant("without hedge", hedge_gate=0.0), Variant("not merged", merge=False)),
        graph=Graph(prompts / "others.jsonl", limit=2),
        timing=Timing(prompts=1, budgets=(2,), repeats=1),
    )


@pytest.fixture(scope="module")
def runtime(tiny_bundle):
    with Runtime.load(tiny_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def measured(config, runtime, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "results.jsonl"
    Bench(config, runtime).run(path)
    return path


def test_every_cell_is_there_once(config, measured):
    lines = read_results(measured)
    cells = [(x["temperature"], x["seed"], x["prompt"]) for x in lines if x["record"] == "prompt"]
    # At temperature 0 seeds make no difference.
    assert cells == [(t, s, p) for p in (0, 1) for t, s in ((0.0, 3), (1.0, 3), (1.0, 4))]
    assert len([x for x in lines if x["record"] == "timing"]) == 4


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("cell", [(0.0, 3, 0), (1.0, 4, 1)])
def test_passes_are_those_of_real_decodes(config, runtime, measured, cell, stop):
    """Every exact method at every length, stopping or not: decoded for real, with its drafter."""
    bench = Bench(config, runtime)
    line = next(x for x in read_results(measured) if (x.get("temperature"), x.get("seed"), x.get("prompt")) == cell)
    (prompt,) = (p for n, p in bench.prompts if n == cell[2])
    checked = 0
    for length in config.lengths:
        view = View(length, stop)
        options = replace(bench.options(Cell(*cell)), max_new_tokens=length, ignore_eos=not stop)
        plain = runtime.generate(bench.given(prompt), options, budget=0)
        assert view.draft_free(line) == plain.nfe
        for entry in line["methods"]:
            if entry["method"] in ORACLES or "passes" not in entry:
                continue
            chosen = replace(options, budget=entry["budget"], gamma=entry["gamma"], verifier=entry["verifier"])
            found = runtime.generate(bench.given(prompt), chosen, drafter=bench.drafter(entry["method"], chosen, None))
            assert found.token_ids == plain.token_ids
            assert view.passes(line, entry) == found.nfe, entry
            checked += 1
            if length == config.lengths[-1] and not stop:
                assert {k: v for k, v in found.rejections.items() if v} == entry["ended"]
    assert checked >= 2 * 2 * 7


def test_a_prompt_that_does_not_fit_is_told_before_anything_is_measured(config, runtime, tmp_path):
    with pytest.raises(SpotDeployError, match="prompt 0 and 4000 new tokens do not fit") as caught:
        Bench(replace(config, lengths=(4000,)), runtime)
    assert caught.value.exit_code == USAGE


def test_more_knowledge_never_costs_passes(measured):
    """joint t contains joint t - 1; with all 32 it is no worse than any chain."""
    compared = 0
    for line in (x for x in read_results(measured) if x["record"] == "prompt"):
        for budget in (2, 5):
            passes = {e["method"]: sum(e["passes"]) for e in line["methods"] if e["budget"] == budget and "passes" in e}
            assert passes["position"] == passes["joint t=1"] >= passes["joint t=2"] >= passes["joint t=32"]
            assert all(passes["joint t=32"] <= passes[m] for m in ("free chain", "SPOT chain"))
            compared += passes["joint t=32"] < passes["free chain"]
    assert compared


def test_an_interrupted_run_goes_on_to_the_same_file(config, runtime, measured, tmp_path):
    path = tmp_path / "results.jsonl"
    whole = measured.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:100])  # killed while writing
    with pytest.raises(SpotDeployError, match="results of something else") as caught:
        Bench(replace(config, budgets=(2, 6)), runtime).run(path)
    assert caught.value.exit_code == USAGE
    others = tmp_path / "prompts.jsonl"
    others.write_text(Path(config.prompts).read_text().replace("three", "two"))
    bench = Bench(config, runtime)
    bench.prompts = load_prompts(replace(config, prompts=str(others)))
    with pytest.raises(SpotDeployError, match="results of something else") as caught:
        bench.run(path)
    assert "prompts_sha256" in caught.value.seen
    done = []
    Bench(config, runtime).run(path, lambda n, note: done.append(n))
    assert done[-1] == Bench(config, runtime).total
    prompts = [[x for x in read_results(p) if x["record"] == "prompt"] for p in (measured, path)]
    assert prompts[0] == prompts[1]


def test_report_holds_all_of_it(measured, tmp_path):
    results = Results(measured)
    checked, broken = results.identities()
    assert not broken
    assert checked > 150
    made = {t.name: t for t in tables(results)}
    assert {"passes-T0-fixed", "oracles-T1-fixed", "rivals", "temperatures", "lengths-T0", "floors-T1", "verifiers",
            "throughput"} <= set(made)  # fmt: skip
    main = made["passes-T0-fixed"]
    assert main.columns == ["kind", "D0", "method", "D2", "D5"]
    assert {row[2] for row in main.rows} == {*RIVALS, *ORACLES, "without hedge", "not merged"}
    (first, *_) = (row for row in main.rows if row[0] == "a")
    line = next(x for x in results.prompts if x["kind"] == "a")
    entry = next(e for e in line["methods"] if (e["method"], e["budget"]) == ("SPOT", 2))
    plain, passes = sum(line["commits"]), sum(entry["passes"])
    assert first[1:4] == [f"{plain:.1f}", "SPOT", f"{passes:.1f} ({plain / passes:.2f}x)"]
    written = write_report(results, tmp_path / "report")
    assert {p.suffix for p in written} == {".html", ".md", ".svg", ".png"}
    page = written[0].read_text()
    assert page.count("<table>") == len(made)
    assert page.count("<svg") == len([p for p in written if p.suffix == ".svg"]) == 6
    assert "src=" not in page  # nothing outside it is needed
    assert "of " + str(checked) + " identities hold" in page


def test_a_broken_identity_is_told(measured, tmp_path):
    lines = read_results(measured)
    lines[1]["methods"][0]["accepted"][0] += 1
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    _, broken = Results(path).identities()
    assert len(broken) == 1
    assert "prompt 0, temperature 0.0, seed 3: SPOT at 2" in broken[0]


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_configurations_that_the_package_brings(name):
    config = read_config(Path(name))
    assert config.bundle.suffix == ".spot"
    assert "methods" in show_config(Path(name))
    if config.prompts == "tasks":
        prompts = load_prompts(config)
        assert {p.kind for _, p in prompts} >= {"gsm8k", "math500", "mbpp", "humaneval", "story", "rotate_matrix"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bundle = 3 = 4", "Expected newline"),
        ('prompts = "a.jsonl"', "bundle"),
        ('bundle = "a"\nprompts = "a.jsonl"\nbudget = [3]', "unknown: budget"),
        ('bundle = "a"\nprompts = "a.jsonl"\nbudgets = [8, 3]', "budgets"),
        ('bundle = "a"\nprompts = "a.jsonl"\nbudgets = [0]', "budgets"),
        ('bundle = "a"\nprompts = "a.jsonl"\nmethods = ["joint t=0"]', "methods"),
        ('bundle = "a"\nprompts = "a.jsonl"\nmethods = ["draft graph"]', "graph"),
        ('bundle = "a"\nprompts = "a.jsonl"\ntemperatures = [true]', "temperatures"),
        ('bundle = "a"\nprompts = "a.jsonl"\nverifiers = ["none"]', "verifiers"),
        ('bundle = "a"\nprompts = "a.jsonl"\n[[variants]]\nname = "SPOT"', "variants"),
        ('bundle = "a"\nprompts = "a.jsonl"\n[timing]\nmethods = ["position"]', "timing"),
        ('bundle = "a"\nprompts = "a.jsonl"\n[timing]\nmethods = 3', "int"),
    ],
)
def test_configurations_that_make_no_sense(tmp_path, text, words):
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(SpotDeployError) as caught:
        read_config(path)
    assert caught.value.exit_code == USAGE
    assert words in caught.value.seen


def test_paths_are_taken_from_where_the_configuration_lies(tmp_path):
    path = tmp_path / "bench.toml"
    path.write_text('bundle = "a.spot"\nprompts = "p.jsonl"\n[[variants]]\nname = "x"\norder_model = "o"')
    config = read_config(path)
    assert (config.bundle, config.prompts) == (tmp_path / "a.spot", str(tmp_path / "p.jsonl"))
    assert config.variants[0].order_model == tmp_path / "o"


@pytest.mark.parametrize("content", ["", "{", '{"record": "run", "format": "other"}\n', "[]\n"])
def test_files_that_are_no_results(tmp_path, content):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(SpotDeployError):
        Results(path)


@pytest.mark.parametrize(
    ("grader", "text", "answer", "right"),
    [
        ("exact", " 1 2\n3 4 ", "1 2\n3 4", True),
        ("exact", "1 2 3 4", "1 2\n3 4", False),
        ("number", "so 3 + 4 = 7 dollars.", "7", True),
        ("number", "it costs $1,234.50", "1234.5", True),
        ("number", "none", "7", False),
        ("boxed", r"thus \boxed{\frac{1}{ 2 }}.", r"\frac{1}{2}", True),
        ("boxed", r"\boxed{1} or \boxed{2}", "2", True),
        ("boxed", r"\boxed{1", "1", False),
        ("python", "```python\ndef f(x):\n    return x + 1\n```", "assert f(1) == 2", True),
        ("python", "def f(x): return x", "assert f(1) == 2", False),
        ("python", "def f(x):\n    while True: pass", "f(1)", False),
        ("python", "def f(x): return bytearray(4 << 30)", "f(1)", False),
    ],
)
def test_graders(monkeypatch, grader, text, answer, right):
    monkeypatch.setattr("spot_deploy.bench.grading.SECONDS", 3)
    assert grade(text, answer, grader, run_code=True) is right


def test_code_runs_only_where_it_may(tmp_path):
    path = tmp_path / "ran"
    assert grade(f"open({str(path)!r}, 'w')", "", "python", run_code=False) is None
    assert not path.exists()
    assert grade("7", None, "exact", run_code=True) is None


def run_cli(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    return caught.value.code


def test_from_the_command_line(tiny_bundle, prompts, tmp_path, capsys):
    """A file, results, and a report; and what is said where something is missing."""
    (tmp_path / "bench.toml").write_text(
        f'bundle = "{tiny_bundle}"\nprompts = "{prompts / "prompts.jsonl"}"\nchat = false\n'
        'per_kind = 1\nkinds = ["a"]\nmethods = ["SPOT", "joint t=2"]\nbudgets = [2]\nlengths = [16]\n'
    )
    results = tmp_path / "results.jsonl"
    assert run_cli("bench", tmp_path / "bench.toml", "-o", results, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"results": str(results), "decodes": 1}
    assert run_cli("report", results, "-o", tmp_path / "report", "--table", "passes-T0-fixed") == 0
    out = capsys.readouterr().out
    assert "| SPOT |" in out
    assert (tmp_path / "report" / "report.html").is_file()
    assert run_cli("report", results, "-o", tmp_path / "report", "--table", "none") == USAGE
    assert "passes-T0-fixed" in capsys.readouterr().err
    assert run_cli("bench", tmp_path / "bench.toml") == USAGE
    assert run_cli("bench", "paper", "--show") == 0
    assert "temperatures = [0.0, 0.5" in capsys.readouterr().out


def test_the_order_model_runs_once_for_every_prefix():
    class Counting:
        rows = 0

        def run(self, features, state_id, depth, masked):
            self.rows += len(features)
            return features.sum(2) + depth[:, None]

    rng = np.random.default_rng(0)
    features = rng.normal(size=(5, 4, 40)).astype(np.float32)
    state_id, depth = np.ones((5, 4), np.int64), np.array([1, 1, 2, 2, 3])
    features[1] = features[0]  # the same prefix twice; the same features at another depth are another
    features[2] = features[0]
    session = Counting()
    remembering = Remembering(session)
    wanted = Counting().run(features, state_id, depth, state_id == 1)
    for rows, computed in (([0, 1, 2], 2), ([2, 3, 0], 3), ([0, 1, 2, 3, 4], 4)):
        found = remembering.run(features[rows], state_id[rows], depth[rows], state_id[rows] == 1)
        np.testing.assert_array_equal(found, wanted[rows])
        assert session.rows == computed
