"""verify: every gate passes on a right engine and fails on an engine that is wrong in its way."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from spot_deploy import Runtime, SpotDeployError
from spot_deploy.engines import backends
from spot_deploy.engines.prefix import HostSession
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.runtime.text import GOLDEN_PASS
from spot_deploy.verification import Gate, golden_pass, invariance_gates, require, verify_engine

NAMES = ["elementwise", "argmax", "traces", "isolation", "joining", "equality"]


class Wrong(HostSession):
    """A session with one fault."""

    def __init__(self, session, fault):
        self.session, self.fault = session, fault
        self.calls = 0

    def run(self, inputs, *, keep):
        out = self.session.run(inputs, keep=keep)
        self.calls += 1
        logits, ids = out.top_logits.copy(), out.top_ids.copy()
        row = out.row
        if self.fault == "off":
            logits *= np.float32(1.001)
        elif self.fault == "nan":
            logits[:, 5] = np.nan
        elif self.fault == "argmax":
            ids[:, [0, 1]] = ids[:, [1, 0]]
        elif self.fault == "mates":  # a state's logits depend on what else is in the pass
            logits += np.float32(int(inputs.input_ids.sum()) % 7) * np.float32(1e-5)
        elif self.fault == "large-batch" and inputs.input_ids.shape[1] > 2:  # other kernels: other numbers
            ids[:, [0, 1]] = ids[:, [1, 0]]
        return replace(out, top_logits=logits, top_ids=ids, row=row)


def gates_of(bundle, fault=None, backend="onnxruntime"):
    opened = open_bundle(bundle)
    signature = opened.manifest.graph("target-split")[1]
    session = backends.open_target(backend, opened.graph_path("target-split"), signature, threads=1, precision="f32")
    session = Wrong(session, fault) if fault else session
    record = __import__("spot_deploy.engines.record", fromlist=["read_record"]).read_record(bundle, backend)
    with Runtime.from_bundle(opened, record, target=session) as runtime:
        gates = verify_engine(opened, runtime, session, precision="f32", budgets=(0, 3, 8), requests=1)
    assert [gate.name for gate in gates] == NAMES
    return {gate.name: gate for gate in gates}


@pytest.mark.parametrize("backend", backends.CPU_BACKENDS)
def test_a_right_engine_passes(tiny_bundle, backend):
    gates = gates_of(tiny_bundle, backend=backend)
    assert all(gate.passed for gate in gates.values())
    assert gates["equality"].figures["accepted"] >= 100
    assert gates["equality"].figures["strict"]
    assert gates["argmax"].figures["rows"] == 72


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("off", "elementwise"),
        ("nan", "elementwise"),
        ("argmax", "argmax"),
        ("argmax", "traces"),
        ("mates", "isolation"),
        ("large-batch", "equality"),
    ],
)
def test_each_fault_fails_its_gate(tiny_bundle, fault, fails):
    gate = gates_of(tiny_bundle, fault)[fails]
    assert not gate.passed
    with pytest.raises(SpotDeployError, match=fails) as caught:
        require(gate, "onnxruntime")
    assert caught.value.exit_code == 3


def test_the_golden_pass_is_the_native_class(tiny_checkpoint, tiny_bundle):
    """Computed again here by transformers alone."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    golden = golden_pass(tiny_bundle)
    config = Qwen3Config(**json.loads((tiny_checkpoint / "config.json").read_text()))
    model = Qwen3ForCausalLM(config)
    weights = load_file(tiny_checkpoint / "model.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    width = golden["states"].shape[1]
    state = golden["states"][4]
    tokens = np.concatenate((golden["clean"], state))
    block = np.arange(len(tokens)) // width
    mask = np.where(block[None] <= block[:, None], 0.0, -1e30).astype(np.float32)
    with torch.no_grad():
        logits = (
            model.float()
            .eval()(torch.from_numpy(tokens)[None], attention_mask=torch.from_numpy(mask)[None, None])
            .logits[0, -width:]
            .numpy()
        )
    rows = slice(4 * width, 5 * width)
    seen = np.take_along_axis(logits, golden["top_ids"][rows], 1)
    assert np.abs(seen - golden["top_logits"][rows]).max() < 1e-4


def test_a_damaged_golden_pass_is_an_error(tiny_copy):
    (tiny_copy / GOLDEN_PASS).write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(SpotDeployError, match=r"golden\.npz"):
        golden_pass(tiny_copy)


def test_require_returns_the_gate():
    gate = Gate("x", True, "fine", {})
    assert require(gate, "onnxruntime") is gate


def test_joining_may_differ_by_what_the_network_rounds_but_isolation_by_nothing():
    kind = {"comparisons": 9, "unequal": 0, "flips": 0, "max_abs": 0.0}
    probe = {"isolation": kind, "joining": kind | {"unequal": 4, "max_abs": 0.02}}

    def passed(probe, error):
        return [gate.passed for gate in invariance_gates(probe, "f32", error)]

    assert passed(probe, 1e-4) == [True, False]
    assert passed(probe, 0.1) == [True, True]
    assert passed(probe | {"isolation": probe["joining"]}, 0.1) == [False, True]
