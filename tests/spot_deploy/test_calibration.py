"""calibrate: what it chooses follows from its own figures, and becomes the engine's default."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.calibration import calibrate, reliability
from spot_deploy.costs import CurveOptions
from spot_deploy.engines.defaults import CALIBRATION, Defaults, read_defaults, write_defaults
from spot_deploy.engines.record import open_record
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import SpotDrafter
from spot_deploy.training.prompts import Prompt

PROMPTS = [Prompt(text, "x") for text in ("the cat sat", "one two three four", "a dog and a bird")]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def calibrated(request, tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    record = open_record(tiny_bundle, "onnxruntime", bundle.manifest.bundle_id)
    session = bundle.open_target(record)
    with Runtime.from_bundle(bundle, record, target=session) as runtime:
        options = DecodeOptions(temperature=request.param, max_new_tokens=24, ignore_eos=True)
        curve = CurveOptions((), repeats=1)
        found = calibrate(runtime, session, PROMPTS, chat=False, budgets=(0, 3, 8), options=options, curve=curve)
        yield runtime, options, *found


def test_the_fastest_of_the_grid_is_chosen(calibrated):
    _, _, defaults, evidence = calibrated
    grid = evidence["grid"]
    assert {row["budget"] for row in grid} == {0, 3, 8}
    best = max(grid, key=lambda row: row["speedup"])
    assert (defaults.budget, defaults.gamma) == (best["budget"], best["gamma"])
    plain = grid[0]
    assert (plain["budget"], plain["passes"], plain["speedup"]) == (0, evidence["commits"], 1.0)
    # A higher floor drafts fewer states, and never saves a pass.
    for budget in (3, 8):
        rows = [row for row in grid if row["budget"] == budget]
        assert [row["gamma"] for row in rows] == [0.0, 0.02, 0.05, 0.1, 0.2]
        assert [row["states"] for row in rows] == sorted((row["states"] for row in rows), reverse=True)
        assert rows[0]["passes"] == min(row["passes"] for row in rows)


def test_passes_of_the_grid_are_those_of_decoding(calibrated):
    runtime, options, defaults, evidence = calibrated
    for row in (evidence["grid"][1], evidence["grid"][-1]):
        passes = 0
        for number, prompt in enumerate(PROMPTS):
            choice = {"budget": row["budget"], "gamma": row["gamma"], "tau": defaults.tau}
            result = runtime.generate(prompt.text, options, seed=number, hedge_gate=defaults.hedge_gate, **choice)
            passes += result.nfe
        assert passes == row["passes"]


def test_settings_need_no_more_passes_than_the_bundles(calibrated):
    _, _, defaults, evidence = calibrated
    tried = evidence["settings"]
    chosen = [t for t in tried if (t["tau"], t["hedge_gate"]) == (defaults.tau, defaults.hedge_gate)]
    assert min(t["passes"] for t in tried if t["hedge_gate"] == defaults.hedge_gate) == chosen[-1]["passes"]
    assert chosen[-1]["passes"] <= tried[0]["passes"]


def test_reliability_counts_every_drafted_state_once(calibrated):
    _, _, _, evidence = calibrated
    for row in evidence["reliability"]:
        assert row["low"] < row["mass"] <= row["high"]
        assert 0 <= row["accepted"] <= 1
    assert sum(row["states"] for row in evidence["reliability"]) > 100


def test_reliability_of_a_drafter_that_knows(tiny_bundle):
    """States of mass 1: accepted up to the first whose token is not among the stale ones."""

    class Knowing(SpotDrafter):
        def draft(self, view):
            from spot_deploy.runtime.drafters import OracleDrafter

            return OracleDrafter(trajectory.lookup, 320).draft(view)

    from spot_deploy.training.replay import Trajectory

    with Runtime.load(tiny_bundle) as runtime:
        trajectory = Trajectory()
        runtime.generate("the cat", budget=0, max_new_tokens=24, ignore_eos=True, observe=trajectory)
        (row,) = reliability(Knowing(runtime.order_model), [(trajectory, None)], 8)
    assert (row["mass"], row["high"]) == (1.0, 1.0)
    assert 0.5 < row["accepted"] < 1


def test_an_engines_own_defaults_are_used_and_go_with_it(tiny_copy):
    write_defaults(tiny_copy, "onnxruntime", Defaults(3, 0.05, 1.25, 0.4), {"grid": []})
    with Runtime.load(tiny_copy) as runtime:
        chosen = runtime.resolve(DecodeOptions())
        assert (chosen.budget, chosen.gamma, chosen.tau, chosen.hedge_gate) == (3, 0.05, 1.25, 0.4)
        assert runtime.resolve(DecodeOptions(budget=8)).budget == 8
    build_engine(tiny_copy, force=True)
    assert read_defaults(tiny_copy, "onnxruntime") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "x"}', None])
def test_damaged_defaults_are_an_error(tiny_copy, text):
    path = write_defaults(tiny_copy, "onnxruntime", Defaults(3, 0.05, 1.0, 0.4), {})
    if text is None:
        text = path.read_text().replace("0.05", "-1")
    path.write_text(text)
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy)
    assert caught.value.code == "calibration"
    assert CALIBRATION in caught.value.fix


def test_the_command_writes_what_it_shows(tiny_copy, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p.text}) + "\n" for p in PROMPTS))

    def spot(*arguments):
        command = [sys.executable, "-P", "-m", "spot_deploy", "calibrate", tiny_copy, "--prompts", prompts, *arguments]
        return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)

    options = ("--max-new-tokens", "16", "--curve-seconds", "1", "--budgets", "0,3")
    shown = spot(*options, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "fastest here: budget" in shown.stdout
    assert "mass against acceptance" in shown.stdout
    assert read_defaults(tiny_copy, "onnxruntime") is None
    document = json.loads(spot(*options, "--json").stdout)
    assert document["written"]
    assert read_defaults(tiny_copy, "onnxruntime") == Defaults(**document["defaults"])
    refused = spot("--budgets", "0,20")
    assert refused.returncode == 2
    assert "up to 8" in refused.stderr
