"""Builds, proves and times every engine that this machine can run, on one bundle: one JSON and one HTML file.

Every engine is handled in a process of its own, so that one that crashes or hangs is a line of the report. What cannot
run is listed with the reason. For machines with a GPU, which the makers of this did not have; see scripts/gpu-check.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment

from spot_deploy import __version__
from spot_deploy.building import BuildOptions, build_engine
from spot_deploy.costs import CurveOptions, cost_curves
from spot_deploy.engines import backends, cuda
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import write_json, write_text
from spot_deploy.engines.record import open_record
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.bundle import open_bundle
from spot_deploy.training.prompts import read_prompts
from spot_deploy.verification import verify_engine

STATES = (1, 2, 3, 4, 6, 9, 13, 21)
CURVE_SECONDS = 20.0
# Errors that say what a machine lacks; all others are failures.
NOT_HERE = ("backend-missing", "provider", "driver-missing", "cuda-missing", "capability", "precision", "backend-clash")
PAGE = """<!doctype html><meta charset="utf-8"><title>spot-deploy: engines of {{ machine.node }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .5em 0 1.5em } td, th { padding: .2em .8em; text-align: right }
th { border-bottom: 1px solid #888; font-weight: 600 } td:first-child, th:first-child { text-align: left }
.bad { color: #a00 } code { background: #f3f3f3 }
</style>
<h1>Engines of {{ machine.node }}</h1>
<p>{{ date }}, spot-deploy {{ version }}, {{ machine.system }}, Python {{ machine.python }}<br>
{{ machine.processor }}<br>{{ machine.gpu or "no GPU: " ~ machine.no_gpu }}<br>
bundle {{ bundle.path }} ({{ bundle.id[:16] }}), {{ prompts }} prompts, {{ new_tokens }} new tokens each</p>
{% for e in engines %}
<h2>{{ e.name }}</h2>
{% if e.error %}<p class="bad">{{ e.error.what }}{% if e.error.seen %}<br><code>{{ e.error.seen }}</code>{% endif %}</p>
{% else %}
<p>built and proven in {{ "%.0f" % e.build_seconds }} s; versions {{ e.versions }}</p>
<table><tr><th>gate</th><th>result</th><th>measured</th></tr>
{% for g in e.gates %}<tr><td>{{ g.name }}</td><td{% if not g.passed %} class="bad"{% endif %}>
{{ "passed" if g.passed else "FAILED" }}</td><td style="text-align:left">{{ g.text }}</td></tr>{% endfor %}</table>
<table><tr><th>states in a pass</th>{% for s in e.curve.curves.half %}<th>{{ s }}</th>{% endfor %}</tr>
<tr><td>milliseconds</td>{% for p in e.curve.curves.half.values() %}<td>{{ "%.2f" % (1000 * p.seconds.median) }}</td>
{% endfor %}</tr><tr><td>cost c(S)</td>{% for p in e.curve.curves.half.values() %}<td>{{ "%.2f" % p.c }}</td>
{% endfor %}</tr></table>
<table><tr><th>decoding</th><th>passes</th><th>commits</th><th>tokens/s</th><th>against D0</th><th>same text</th>
<th>bytes read a pass</th></tr>
{% for d in e.decoding %}<tr><td>{{ "draft-free" if not d.budget else "SPOT D%d" % d.budget }}</td>
<td>{{ d.passes }}</td><td>{{ d.commits }}</td><td>{{ "%.1f" % d.tokens_per_second }}</td>
<td>{{ "%.2f" % d.speedup }}x</td>
<td{% if not d.identical %} class="bad"{% endif %}>{{ "yes" if d.identical else "no" }}</td>
<td>{{ "{:,.0f}".format(d.bytes_per_pass) }}</td></tr>{% endfor %}</table>
{% endif %}{% endfor %}
"""


def wanted() -> Iterator[dict[str, Any]]:
    """Options of every engine to try, in the order of the report: those on a GPU first."""
    for backend in ("tensorrt-rtx", "tensorrt"):
        for layout, precision in (("packed", "bf16"), ("split", "f32")):
            yield {"backend": backend, "precision": precision, "layout": layout}
    for provider in ("cuda", "cpu", "tensorrt"):
        yield {"backend": "onnxruntime", "provider": provider, "precision": "f32"}
    yield {"backend": "openvino", "precision": "f32"}


def name_of(options: dict[str, Any]) -> str:
    return " ".join(str(value) for value in options.values())


def machine() -> dict[str, Any]:
    try:
        gpu, lacking = cuda.versions(), cuda.missing_driver()
    except SpotDeployError as error:
        gpu, lacking = {}, f"{error.what}: {error.seen}"
    return {
        "node": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": backends.processor(),
        "gpu": ", ".join(gpu.values()),
        "no_gpu": lacking,
    }


def check(bundle: Path, options: dict[str, Any], prompts: Path, limit: int, new_tokens: int) -> dict[str, Any]:
    """Build, prove and time one engine.

    Raises:
        SpotDeployError: it cannot be built or run here. Gates that fail are part of the result.
    """
    backend = options["backend"]
    backends.require(backend)
    if backends.builds_without_device(backend):
        backends.require_device(backend, "gpu")
        options = options | {"targets": (cuda.capability(),)}
    began = time.perf_counter()
    record, _ = build_engine(bundle, BuildOptions(**options), force=True)
    seconds = time.perf_counter() - began
    opened = open_bundle(bundle)
    record = open_record(bundle, backend, opened.manifest.bundle_id)
    session = opened.open_target(record)
    inputs, decoding = record.inputs, opened.manifest.decoding
    with Runtime.from_bundle(opened, record, target=session) as runtime:
        gates = verify_engine(
            opened, runtime, session, precision=inputs.precision, budgets=inputs.budgets, requests=inputs.requests,
            strict_before=record.exact,
        )  # fmt: skip
        bucket = decoding.buckets[len(decoding.buckets) // 2]
        states = [count for count in STATES if count <= 1 + inputs.budgets[-1]]
        choice = CurveOptions(states, seconds=CURVE_SECONDS)
        curve = cost_curves(session, decoding, decoding.block_width, bucket, inputs.budgets, choice)
        budgets = sorted({0, *(b for b in inputs.budgets if b in (1, 3, 8))})
        questions = [[{"role": "user", "content": p.text}] for p in read_prompts(prompts, limit)]
        return {
            "exact": record.exact,
            "versions": dict(inputs.versions),
            "build_seconds": seconds,
            "record": asdict(record),
            "gates": [asdict(gate) for gate in gates],
            "curve": curve,
            "decoding": decode(runtime, questions, budgets, new_tokens),
        }


def decode(runtime: Runtime, questions: list[Any], budgets: list[int], new_tokens: int) -> list[dict[str, Any]]:
    """All questions at every budget in turn, after a warm-up of each: passes, speed, and whether texts are the same."""
    totals: dict[int, dict[str, Any]] = {
        b: {"seconds": 0.0, "tokens": [], "passes": 0, "commits": 0, "fetched": 0} for b in budgets
    }
    for question in questions:
        for budget in budgets:
            for _ in range(2):  # the second pass of a shape is the one that a CUDA graph is recorded from
                runtime.generate(question, budget=budget, max_new_tokens=new_tokens)
    for question in questions:
        for budget, total in totals.items():
            result = runtime.generate(question, budget=budget, max_new_tokens=new_tokens)
            total["fetched"] += result.fetched
            total["seconds"] += result.seconds
            total["tokens"] += result.token_ids
            total["passes"] += result.nfe
            total["commits"] += result.commits
    free = totals[0]
    return [
        {
            "budget": budget,
            "passes": total["passes"],
            "commits": total["commits"],
            "tokens_per_second": len(total["tokens"]) / total["seconds"],
            "speedup": free["seconds"] / total["seconds"],
            "identical": total["tokens"] == free["tokens"],
            "bytes_per_pass": total["fetched"] / total["passes"],
        }
        for budget, total in totals.items()
    ]


def in_process(arguments: list[str], options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """`check` in a process of its own; what went wrong, if it did, is under `error`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-P", __file__, *arguments, "--engine", json.dumps(options), "-o", str(result)]
        try:
            done = subprocess.run(command, timeout=max(1.0, seconds), capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"error": {"code": "too-slow", "what": f"it was not done after {seconds:.0f} s", "seen": ""}}
        lines = " | ".join(done.stderr.strip().splitlines()[-4:])
        if result.is_file():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            if "error" in found and found["error"]["code"] not in NOT_HERE:  # what the backend itself said
                found["error"]["seen"] = "; ".join(part for part in (found["error"]["seen"], lines) if part)
            return found
        return {"error": {"code": "crash", "what": f"its process ended with {done.returncode}", "seen": lines}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, default=3, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=10, help="for all engines together")
    parser.add_argument("--only", nargs="*", default=[], help="backends to try; default: all")
    parser.add_argument("--engine", help="options of one engine as JSON: check it in this process")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; the HTML file lies beside it")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.engine:
        options = json.loads(args.engine)
        try:
            found = check(args.bundle, options, args.prompts, args.limit, args.max_new_tokens)
        except SpotDeployError as error:
            found = {"error": error.as_dict()}
        write_json(args.output, found)
        return
    end = time.monotonic() + 60 * args.minutes
    arguments = [str(args.bundle), "--prompts", str(args.prompts), "--limit", str(args.limit)]
    arguments += ["--max-new-tokens", str(args.max_new_tokens)]
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": machine(),
        "bundle": {"path": args.bundle.name, "id": open_bundle(args.bundle).manifest.bundle_id},
        "prompts": args.limit,
        "new_tokens": args.max_new_tokens,
        "engines": [],
    }
    page = Environment(autoescape=True).from_string(PAGE)
    left = [options for options in wanted() if not args.only or options["backend"] in args.only]
    while left:
        # An engine that is slow takes no more than twice its share.
        share = 2 * max(0.0, end - time.monotonic()) / (1 + len(left))
        options = left.pop(0)
        found = in_process(arguments, options, share)
        document["engines"].append({"name": name_of(options), "options": options, **found})
        write_json(args.output, document)
        write_text(args.output.with_suffix(".html"), page.render(document))
        said = found["error"]["what"] if "error" in found else _line(found)
        print(f"{name_of(options)}: {said}", flush=True)
    gates = [g for e in document["engines"] for g in e.get("gates", []) if not g["passed"]]
    broken = [e for e in document["engines"] if "error" in e and e["error"]["code"] not in NOT_HERE]
    failed = gates + broken
    said = f"{len(gates)} gates failed, {len(broken)} engines failed"
    print(f"{args.output} and {args.output.with_suffix('.html').name} are written; {said}")
    raise SystemExit(3 if failed else 0)


def _line(found: dict[str, Any]) -> str:
    passed = sum(gate["passed"] for gate in found["gates"])
    best = max(found["decoding"], key=lambda row: row["tokens_per_second"])
    free = found["decoding"][0]
    return (
        f"{passed} of {len(found['gates'])} gates passed, {'exact' if found['exact'] else 'not bit-exact'}; draft-free "
        f"{free['tokens_per_second']:.1f} tokens/s, best D{best['budget']} {best['tokens_per_second']:.1f}"
    )


if __name__ == "__main__":
    main()
