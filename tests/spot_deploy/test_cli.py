"""The command line: results on stdout, everything else on stderr, one clear error and the right exit code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spot_deploy.cli.main import VERBS, main
from spot_deploy.engines.files import STAGING, staged_folder
from spot_deploy.training.prompts import read_prompts


@pytest.fixture
def spot(capsys, monkeypatch):
    """Runs the command line in this process; returns code, out and err."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["spot-deploy", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(code=caught.value.code, out=out, err=err)

    return run


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.mark.parametrize("verb", [*sorted(set(VERBS) - {"drafter"}), "drafter import"])
def test_every_verb_has_help_and_json(spot, verb):
    result = spot(*verb.split(), "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_help_imports_nothing_heavy():
    """What keeps `--help` fast."""
    code = (
        "import sys\nfrom spot_deploy.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = python("-c", code)
    assert "export" in done.stdout
    heavy = {"numpy", "torch", "onnx", "onnxruntime", "transformers", "tokenizers", "jinja2", "rich", "safetensors"}
    assert not heavy & set(re.findall(r"\w+", done.stderr))


def test_importing_the_package_imports_nothing_heavy():
    done = python("-c", "import sys, spot_deploy; print(*sorted({m.split('.')[0] for m in sys.modules}))")
    assert not {"numpy", "torch", "onnx", "onnxruntime", "transformers", "tokenizers"} & set(done.stdout.split())


@pytest.mark.parametrize("budget", [0, 3])
def test_run_json(spot, tiny_bundle, budget):
    result = spot("run", tiny_bundle, "--prompt", "the cat", "--budget", budget, "--max-new-tokens", 20, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    wanted = {
        "text", "token_ids", "nfe", "prefill_forwards", "store_forwards", "commits", "accepted", "rounds", "seconds",
        "budget", "gamma", "temperature", "seed", "verifier", "backend", "exact",
    }  # fmt: skip
    assert wanted <= set(document)
    assert document["nfe"] + document["accepted"] == document["commits"]
    assert document["budget"] == budget
    assert document["exact"] is True


def test_run_prints_text_on_stdout_and_figures_on_stderr(spot, tiny_bundle):
    arguments = ("run", tiny_bundle, "--prompt", "the cat", "--max-new-tokens", 20, "--ignore-eos")
    whole = spot(*arguments, "--no-stream")
    streamed = spot(*arguments, "--stream")
    document = json.loads(spot(*arguments, "--json").out)
    assert whole.out == streamed.out == document["text"] + "\n"
    assert "passes" in whole.err
    assert "exact: yes" in whole.err


@pytest.mark.parametrize("temperature", [0, 1])
def test_compare_shows_both_and_says_identical(spot, tiny_bundle, temperature):
    arguments = ("run", tiny_bundle, "--prompt", "a dog", "--max-new-tokens", 24, "--compare", "--ignore-eos")
    shown = spot(*arguments, "--temperature", temperature)
    assert shown.code == 0
    assert "draft-free" in shown.err
    assert "SPOT D3" in shown.err
    assert "the texts are identical" in shown.err
    document = json.loads(spot(*arguments, "--temperature", temperature, "--json").out)
    assert document["compare"]["identical"] is True
    assert document["compare"]["nfe"] == document["compare"]["commits"] == document["commits"]


def test_compare_fails_loudly_when_an_exact_mode_differs(spot, tiny_bundle, monkeypatch):
    from spot_deploy.runtime import decode

    real = decode._walk

    def wrong(states, heads, noise, verifier, figures, observe):
        accepted, end = real(states, heads, noise, verifier, figures, observe)
        if len(states) > 1:
            tokens = end.successor.tokens.copy()
            tokens[end.commit.position] = (end.commit.token + 1) % 256
            commit = decode.Commit(end.commit.position, int(tokens[end.commit.position]))
            state = decode.State(end.state.block, tokens, end.state.mask_id, end.successor.commits)
            end = replace(end, successor=state, commit=commit)
        return accepted, end

    monkeypatch.setattr(decode, "_walk", wrong)
    result = spot("run", tiny_bundle, "--prompt", "a dog", "--max-new-tokens", 24, "--compare", "--ignore-eos")
    assert result.code == 3
    assert "not-lossless" in result.err


def test_chat_and_stdin(spot, tiny_bundle):
    typed = spot("run", tiny_bundle, "--prompt", "the cat", "--chat", "--max-new-tokens", 9, "--json")
    piped = spot("run", tiny_bundle, "--prompt", "-", "--chat", "--max-new-tokens", 9, "--json", stdin=b"the cat\n")
    plain = spot("run", tiny_bundle, "--prompt", "the cat", "--max-new-tokens", 9, "--json")
    assert json.loads(typed.out)["token_ids"] == json.loads(piped.out)["token_ids"]
    assert json.loads(typed.out)["prompt_tokens"] > json.loads(plain.out)["prompt_tokens"]


USAGE = {
    "no-verb": ["frobnicate"],
    "no-prompt": ["run", "BUNDLE"],
    "empty-prompt": ["run", "BUNDLE", "--prompt", ""],
    "option": ["run", "BUNDLE", "--prompt", "x", "--bugdet", "3"],
    "budget": ["run", "BUNDLE", "--prompt", "x", "--budget", "-1"],
    "budget-word": ["run", "BUNDLE", "--prompt", "x", "--budget", "many"],
    "gamma": ["run", "BUNDLE", "--prompt", "x", "--gamma", "-0.5"],
    "temperature": ["run", "BUNDLE", "--prompt", "x", "--temperature", "-1"],
    "temperature-nan": ["run", "BUNDLE", "--prompt", "x", "--temperature", "nan"],
    "verifier": ["run", "BUNDLE", "--prompt", "x", "--verifier", "trust"],
    "backend": ["run", "BUNDLE", "--prompt", "x", "--backend", "abacus"],
    "seed": ["run", "BUNDLE", "--prompt", "x", "--seed", str(2**64)],
    "capacity": ["run", "BUNDLE", "--prompt", "x" * 300],
    "length": ["run", "BUNDLE", "--prompt", "x", "--max-new-tokens", "1000"],
    "threads": ["run", "BUNDLE", "--prompt", "x", "--threads", "9999999999999"],
    "layout": ["build-engine", "BUNDLE", "--layout", "diagonal"],
    "parity": ["export", "X", "-o", "Y", "--parity", "some"],
    "budgets": ["export", "X", "-o", "Y", "--budgets", "3;8"],
    "budgets-negative": ["eval-drafter", "BUNDLE", "--prompts", "x", "--budgets", "0,-3"],
    "budgets-large": ["export", "X", "-o", "Y", "--budgets", "0,500"],
    "precisions": ["export", "X", "-o", "Y", "--precisions", "f16,f64"],
    "precisions-twice": ["export", "X", "-o", "Y", "--precisions", "f16,f16"],
    "gamma-nan": ["export", "X", "-o", "Y", "--gamma", "nan"],
    "compare-nothing": ["run", "BUNDLE", "--prompt", "x", "--budget", "0", "--compare"],
    "prompts-missing": ["record", "BUNDLE", "--prompts", "nothing.jsonl", "-o", "Z"],
}


@pytest.mark.parametrize("arguments", USAGE.values(), ids=USAGE.keys())
def test_usage_errors(spot, tiny_bundle, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = spot(*[str(tiny_bundle) if a == "BUNDLE" else a for a in arguments])
    assert result.code == 2
    assert result.err.count("Error") == 1
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"caf\xe9", b"\xff\xfe\x00", b"ok\xed\xa0\x80"], ids=["latin1", "utf16", "surrogate"])
def test_stdin_that_is_not_utf8(spot, tiny_bundle, data):
    result = spot("run", tiny_bundle, "--prompt", "-", stdin=data)
    assert result.code == 2
    assert "not UTF-8" in result.err
    assert "offset" in result.err


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_empty_stdin(spot, tiny_bundle, data):
    assert spot("run", tiny_bundle, "--prompt", "-", stdin=data).code == 2


def test_damaged_bundle_is_one_error(spot, tiny_copy):
    path = tiny_copy / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    for verb in (["run", tiny_copy, "--prompt", "x"], ["inspect", tiny_copy], ["build-engine", tiny_copy]):
        result = spot(*verb)
        assert result.code == 1
        assert "weights.safetensors has changed" in result.err
        assert "fix:" in result.err
        assert result.out == ""
    shown = spot("inspect", tiny_copy, "--json")
    assert json.loads(shown.out)["error"]["code"] == "bundle-file-changed"


def test_inspect(spot, tiny_bundle):
    shown = spot("inspect", tiny_bundle)
    assert shown.code == 0
    for part in ("sdar", "8 positions", "mask 299", "past_k.0", "order.onnx", "strictly exact"):
        assert part in shown.out
    document = json.loads(spot("inspect", tiny_bundle, "--json").out)
    assert document["engines"]["onnxruntime"]["probe"]["strict"] is True


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"format": "spot-deploy-engine", "schema_version": 1}'])
def test_inspect_of_a_damaged_engine_record(spot, tiny_copy, content):
    (tiny_copy / "engines" / "onnxruntime" / "engine.json").write_text(content)
    result = spot("inspect", tiny_copy)
    assert result.code == 1
    assert result.out == ""
    assert "build-engine" in result.err


def test_errors_are_objects_with_json(spot, tiny_bundle):
    usage = spot("run", tiny_bundle, "--prompt", "x", "--budget", "-1", "--json")
    assert usage.code == 2
    assert json.loads(usage.out)["error"]["code"] == "usage"


def test_other_threads_than_the_probe_had_are_not_called_exact(spot, tiny_bundle):
    arguments = ("run", tiny_bundle, "--prompt", "x", "--max-new-tokens", 8, "--json")
    assert json.loads(spot(*arguments, "--threads", 2).out)["exact"] is False
    assert json.loads(spot(*arguments, "--threads", 2, "--budget", 0).out)["exact"] is True
    assert json.loads(spot(*arguments, "--budget", 9).out)["exact"] is False  # probed up to 8
    assert json.loads(spot(*arguments, "--budget", 8).out)["exact"] is True


def test_build_engine_says_up_to_date(spot, tiny_copy):
    first = json.loads(spot("build-engine", tiny_copy, "--threads", 1, "--json").out)
    forced = json.loads(spot("build-engine", tiny_copy, "--threads", 1, "--force", "--json").out)
    assert (first["built"], forced["built"]) == (False, True)
    assert forced["probe"]["strict"] is True


def test_export_to_run_as_a_user_would(spot, tiny_checkpoint, random_order_model, tmp_path):
    bundle = tmp_path / "b.spot"
    made = spot("export", tiny_checkpoint, "--order-model", random_order_model, "-o", bundle, "--parity", "none")
    assert made.code == 0, made.err
    assert "engine" in spot("run", bundle, "--prompt", "x").err  # tells to build one
    assert spot("build-engine", bundle, "--threads", 1).code == 0
    assert spot("run", bundle, "--prompt", "x", "--max-new-tokens", 9).code == 0


@pytest.mark.parametrize(
    ("checkpoint", "code"), [("nothing", "checkpoint-missing"), ("BUNDLE", "checkpoint-missing")], ids=str
)
def test_export_of_what_is_no_checkpoint(spot, tiny_bundle, tmp_path, checkpoint, code):
    source = tiny_bundle if checkpoint == "BUNDLE" else tmp_path / checkpoint
    result = spot("export", source, "-o", tmp_path / "out.spot")
    assert result.code == 1
    assert code in result.err
    assert list(tmp_path.iterdir()) == []


def test_record_train_eval(spot, tiny_bundle, random_order_model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    words = ("the cat", "a dog ran", "one two three", "the big red house", "mat", "seven six")
    lines = [json.dumps({"prompt": w, "kind": "even" if i % 2 else "odd"}) for i, w in enumerate(words * 4)]
    prompts.write_text("\n".join(lines))
    records = tmp_path / "records"
    shared = ("--prompts", prompts, "--max-new-tokens", 16, "--json")
    first = spot("record", tiny_bundle, "-o", records, *shared)
    assert first.code == 0, first.err
    assert json.loads(first.out)["passes_recorded_now"] > 100
    shard = records / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    again = json.loads(spot("record", tiny_bundle, "-o", records, *shared).out)
    assert 0 < again["passes_recorded_now"] < json.loads(first.out)["passes_recorded_now"]
    assert shard.read_bytes() == content
    bad = spot("record", tiny_bundle, "-o", tmp_path / "none", *shared, "--temperatures", "0,0.001")
    assert bad.code == 2
    long = spot("record", tiny_bundle, "-o", tmp_path / "none", "--prompts", prompts, "--max-new-tokens", 9999)
    assert long.code == 2
    assert not (tmp_path / "none").exists()
    other = spot("record", tiny_bundle, "-o", records, *shared, "--seed", 9)
    assert other.code == 1
    assert "other settings" in other.err

    model = tmp_path / "order"
    options = ("--steps", 30, "--batch", 16, "--json")
    trained = spot("train-drafter", records, "-o", model, *options)
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["accuracy_by_depth"]["1"]["examples"] > 0
    card = json.loads((model / "order_model.json").read_text())
    assert card["steps"] == 30
    longer = spot("train-drafter", records, "-o", model, "--steps", 40, "--batch", 16, "--json")
    assert json.loads((model / "order_model.json").read_text())["steps"] == 40, longer.err
    elsewhere = spot("train-drafter", records, "-o", model, "--steps", 50, "--batch", 8)
    assert elsewhere.code == 1
    assert "another training run" in elsewhere.err
    tuned_folder = tmp_path / "tuned"
    tuned = spot("train-drafter", records, "-o", tuned_folder, "--init", model, *options)
    assert tuned.code == 0

    shown = spot("eval-drafter", tiny_bundle, "--prompts", prompts, "--limit", 3, "--max-new-tokens", 16, "--json")
    result = json.loads(shown.out)
    assert set(result["kinds"]) == {"odd", "even", "all"}
    row = result["kinds"]["all"]
    assert 0 <= row["stale_coverage"] <= 1
    for budget in ("3", "8", "20"):
        by_name = {name: passes[budget] for name, passes in row["passes"].items()}
        assert by_name["joint t=32"] <= by_name["joint t=2"] <= by_name["joint t=1"] == by_name["position"]
        assert by_name["SPOT"] <= row["draft_free"]
    table = spot("eval-drafter", tiny_bundle, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 9)
    assert "joint t=32" in table.out
    both = spot(
        "eval-drafter", tiny_bundle, "--prompts", prompts, "--limit", 3, "--max-new-tokens", 16, "--json",
        "--order-model", tuned_folder, "--order-model", random_order_model,
    )  # fmt: skip
    passes = json.loads(both.out)["kinds"]["all"]["passes"]
    for budget, value in passes[f"SPOT {random_order_model}"].items():  # the bundle's own, in torch
        assert value == pytest.approx(passes["SPOT"][budget], rel=0.1)
    assert passes[f"SPOT {tuned_folder}"] != passes["SPOT"]


def test_right_answers_are_counted(spot, tiny_bundle, tiny_runtime, tmp_path):
    right = tiny_runtime.generate("the cat", max_new_tokens=9).text
    lines = [
        {"prompt": "the cat", "answer": f" {right}\n", "kind": "a"},
        {"prompt": "the dog", "answer": "no", "kind": "a"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"prompt": "the", "kind": "b"}]))
    result = spot("eval-drafter", tiny_bundle, "--prompts", path, "--max-new-tokens", 9, "--json")
    kinds = json.loads(result.out)["kinds"]
    assert (kinds["a"]["exact_match"], kinds["b"]["exact_match"], kinds["all"]["exact_match"]) == (0.5, None, 0.5)
    assert 0 < kinds["all"]["committed_probability"] < 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "a\\ud800"}',
        "[" * 100_000,
        '{"kind": "x"}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": "a", "answer": 3}',
        "",
    ],
    ids=ascii,
)
def test_prompt_files_that_are_none(spot, tiny_bundle, tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    result = spot("eval-drafter", tiny_bundle, "--prompts", path)
    assert result.code == 2
    assert "p.jsonl" in result.err


def test_prompts_may_hold_any_line_separator_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\ufeff" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [p.text for p in read_prompts(path)] == ["a\u2028b"]


def test_full_disk_is_one_error(tiny_bundle):
    code = "from spot_deploy.__main__ import main; main()"
    arguments = ["run", str(tiny_bundle), "--prompt", "x", "--max-new-tokens", "8", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"Error") == 1


def test_training_that_diverges_or_cannot_be(spot, tmp_path):
    for option in (("--learning-rate", "inf"), ("--seed", 2**64)):
        assert spot("train-drafter", tmp_path, "-o", tmp_path / "o", *option).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_ends_with_130(tiny_bundle, heeding_signals, number):
    command = [sys.executable, "-P", "-c", "from spot_deploy.cli.main import main; main()", "run", str(tiny_bundle)]
    process = subprocess.Popen(
        [*command, "--prompt", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=heeding_signals,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # wait until it reads standard input, that is, until it listens to Ctrl-C
        with open(f"/proc/{process.pid}/wchan") as file:
            if "pipe" in file.read():
                break
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_output_may_be_cut_off(tiny_bundle):
    read, write = os.pipe()
    os.close(read)
    code = "from spot_deploy.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", str(tiny_bundle), "--prompt", "x", "--max-new-tokens", "8"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_verify(spot, tiny_bundle):
    shown = spot("verify", tiny_bundle)
    assert (shown.code, shown.out) == (0, "passed\n")
    document = json.loads(spot("verify", tiny_bundle, "--backend", "openvino", "--json").out)
    assert document["passed"]
    assert [gate["name"] for gate in document["gates"]][-1] == "equality"


def test_verify_fails_with_exit_code_3(spot, tiny_bundle, monkeypatch):
    from spot_deploy import verification

    failed = verification.Gate("argmax", False, "0.0% of 72 rows", {})
    monkeypatch.setattr(verification, "verify_engine", lambda *a, **k: [failed])
    shown = spot("verify", tiny_bundle)
    assert (shown.code, shown.out) == (3, "failed\n")
    assert "FAIL" in shown.err
    machine = spot("verify", tiny_bundle, "--json")
    assert machine.code == 3
    assert json.loads(machine.out)["passed"] is False


def test_doctor_finds_what_is_wrong_and_what_was_left(spot, tiny_copy, monkeypatch):
    monkeypatch.chdir(tiny_copy.parent)
    well = spot("doctor", tiny_copy)
    assert well.code == 0
    assert "onnxruntime cpu" in well.out
    assert "NVIDIA" in well.out
    assert "leftover    none" in well.out
    left = tiny_copy / "engines" / f"{STAGING}x"
    left.mkdir()
    (left / "engine.json").write_text("{}")
    (tiny_copy.parent / f"{STAGING}y").write_text("half")
    report = json.loads(spot("doctor", "--json").out)
    assert {entry["path"] for entry in report["leftovers"]} == {str(left), str(tiny_copy.parent / f"{STAGING}y")}
    assert left.exists()
    with staged_folder(tiny_copy.parent / "other", force=False, ours=lambda _: False) as live:
        shown = spot("doctor", "--clean")
        assert (shown.code, live.exists()) == (0, True)
        assert "in use" in shown.out
    assert not left.exists()
    assert not (tiny_copy.parent / f"{STAGING}y").exists()
    assert (tiny_copy / "engines" / "onnxruntime" / "engine.json").exists()
    (tiny_copy / "engines" / "onnxruntime" / "engine.json").write_text("{")
    ill = spot("doctor", tiny_copy)
    assert ill.code == 1
    assert "FAULT" in ill.out
    (tiny_copy / "tokenizer.json").write_text("{}")
    assert spot("doctor", tiny_copy, "--json").code == 1


def test_inspect_layers(spot, tiny_bundle):
    shown = spot("inspect", tiny_bundle, "--layers")
    assert shown.code == 0
    assert "nodes of target-split" in shown.out
    layers = json.loads(spot("inspect", tiny_bundle, "--layers", "--json").out)["layers"]
    parts = {part["part"]: part for part in layers["target-split"]}
    assert {"layer 0", "layer 1", "outside the layers"} == set(parts)
    for name in ("layer 0", "layer 1"):
        assert parts[name]["operators"]["Gemm"] == 7
        assert parts[name]["operators"]["Softmax"] == 1
    assert parts["outside the layers"]["operators"]["TopK"] == 1


def test_build_engine_explains_and_rehearses(spot, tiny_copy):
    before = sorted(tiny_copy.rglob("*"))
    same = spot("build-engine", tiny_copy, "--threads", 1, "--explain")
    assert "up to date" in same.out
    other = spot("build-engine", tiny_copy, "--threads", 2, "--budgets", "3", "--explain")
    assert other.out.splitlines() == ["changed  threads: 1 -> 2", "changed  budgets: 0,3,8 -> 0,3"]
    rehearsed = spot("build-engine", tiny_copy, "--threads", 2, "--dry-run")
    for part in ("memory", "disk", "--threads 2", "speculate"):
        assert part in rehearsed.out
    document = json.loads(spot("build-engine", tiny_copy, "--threads", 2, "--dry-run", "--json").out)
    assert document["changes"] == ["threads: 1 -> 2"]
    assert len(document["profiles"]) == 3
    assert sorted(tiny_copy.rglob("*")) == before


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
def test_gpu_backends_say_what_is_missing(spot, tiny_bundle, backend):
    for verb in (["run", tiny_bundle, "--prompt", "x"], ["verify", tiny_bundle]):
        result = spot(*verb, "--backend", backend)
        assert result.code == 4
        assert result.err.count("Error") == 1
        assert "fix:" in result.err
