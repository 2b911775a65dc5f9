"""The public API: streaming, threads, life cycle, and a process without torch, onnx and transformers."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_target import ToyTarget, toy_runtime

from spot_deploy import CommitEvent, DecodeOptions, Finished, Runtime, SpotDeployError, TextEvent


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_and_generate_agree(tiny_runtime, temperature):
    options = DecodeOptions(temperature=temperature, seed=2, max_new_tokens=30, ignore_eos=True, budget=3)
    events = list(tiny_runtime.stream("the cat", options))
    result = events[-1].result
    assert isinstance(events[-1], Finished)
    assert result.token_ids == tiny_runtime.generate("the cat", options).token_ids
    pieces = [e.text for e in events if isinstance(e, TextEvent)]
    assert len(pieces) > 1
    assert "".join(pieces) == result.text == tiny_runtime.text.decode(result.token_ids)
    commits = [e for e in events if isinstance(e, CommitEvent)]
    assert len(commits) == result.commits
    assert sum(e.drafted for e in commits) == result.accepted
    assert len({e.position for e in commits}) == len(commits)


def test_settled_text_waits_for_gaps():
    """Text comes out only when every position before it is committed."""
    runtime = toy_runtime(ToyTarget(width=6, vocab=9, mask_id=8))
    known, text = {}, ""
    for event in runtime.stream([1, 2], max_new_tokens=10, ignore_eos=True):
        if isinstance(event, CommitEvent):
            known[event.position] = event.token
        elif isinstance(event, TextEvent):
            text += event.text
            assert all(chr(97 + known[2 + i]) == c for i, c in enumerate(text))
    assert len(text) == 10


def test_threads_share_a_runtime(each_runtime):
    jobs = [("the cat", 0.0, 1), ("a dog ran", 1.0, 2), ("one two", 1.0, 3), ("big red", 1.5, 4)] * 3
    options = {"max_new_tokens": 24, "ignore_eos": True}

    def decode(job):
        prompt, temperature, seed = job
        return each_runtime.generate(prompt, temperature=temperature, seed=seed, **options).token_ids

    alone = [decode(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(decode, jobs)) == alone


def test_closed_runtime_says_so(tiny_bundle):
    with Runtime.load(tiny_bundle) as runtime:
        assert runtime.generate("the", max_new_tokens=4).commits
    with pytest.raises(RuntimeError, match="closed"):
        runtime.generate("the")


@pytest.mark.parametrize("ids", [[-1], [320], [299]], ids=["negative", "too-large", "mask"])
def test_ids_that_are_no_text(tiny_runtime, ids):
    with pytest.raises(SpotDeployError) as caught:
        tiny_runtime.generate(ids)
    assert caught.value.code == "prompt-ids"


@pytest.mark.parametrize(
    "prompt", [[{"role": "user"}], [{"role": "user", "content": None}], ["a"], [1, "a"], [1.5]], ids=repr
)
def test_prompts_of_no_kind(tiny_runtime, prompt):
    with pytest.raises(SpotDeployError) as caught:
        tiny_runtime.generate(prompt)
    assert caught.value.code == "prompt-type"


def test_arguments_are_checked_before_the_first_event(tiny_runtime):
    with pytest.raises(SpotDeployError):
        tiny_runtime.stream("the", max_new_tokens=10_000)


def test_unknown_backend_and_missing_engine(tiny_copy):
    with pytest.raises(SpotDeployError) as caught:
        Runtime.load(tiny_copy, backend="abacus")
    assert caught.value.exit_code == 2
    (tiny_copy / "engines" / "onnxruntime" / "engine.json").unlink()
    with pytest.raises(SpotDeployError, match="no engine") as caught:
        Runtime.load(tiny_copy)
    assert "build-engine" in caught.value.fix


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
{body}
"""


def run_python(body, names):
    code = BLOCKED.format(names=names, body=body)
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)


def test_decodes_with_torch_transformers_and_onnx_blocked(tiny_bundle):
    body = f"""
from spot_deploy import Runtime
with Runtime.load({str(tiny_bundle)!r}) as runtime:
    chat = [{{"role": "user", "content": "the cat"}}]
    result = runtime.generate(chat, temperature=1.0, max_new_tokens=20, ignore_eos=True)
print(len(result.token_ids), result.accepted >= 0)
"""
    names = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "hypothesis"}
    done = run_python(body, names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["20", "True"]


@pytest.mark.parametrize(("backend", "extra"), [("onnxruntime", "cpu"), ("openvino", "openvino")])
def test_without_a_backend_the_error_names_the_extra(tiny_bundle, backend, extra):
    body = f"""
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {backend!r} else real(name, package)
from spot_deploy.cli.main import main
main(["run", {str(tiny_bundle)!r}, "--prompt", "x", "--backend", {backend!r}])
"""
    done = run_python(body, {backend})
    assert done.returncode == 4
    assert f'pip install "spot-deploy[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr
