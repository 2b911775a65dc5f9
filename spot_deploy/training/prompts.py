"""Prompt files: JSON lines, each an object with `prompt`, `kind` if results shall be told apart, the right `answer`
if there is one, and the `grader` that compares (see bench.grading; `exact` unless given)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spot_deploy.bench.grading import GRADERS
from spot_deploy.engines.errors import usage_error


@dataclass(frozen=True)
class Prompt:
    text: str
    kind: str
    answer: str | None = None
    grader: str = "exact"


def read_prompts(path: Path, limit: int | None = None, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Read a prompt file: the first `limit` prompts, of `kinds` where some are named.

    Raises:
        SpotDeployError: it is missing, a line is no such object, or nothing is of such a kind (exit code 2).
    """
    fix = 'give JSON lines such as {"prompt": "How much is 2 + 2?", "kind": "sums"}'
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a JSON string may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error("prompts", f"cannot read {path}", seen=str(error), fix=fix) from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            prompt = Prompt(document["prompt"], str(document.get("kind", "prompts")), document.get("answer"))
            grader = document.get("grader", "exact")
            if grader not in GRADERS:
                raise ValueError(f"grader is {grader!r}, none of {', '.join(GRADERS)}")
            prompt = replace(prompt, grader=grader)
            if not isinstance(prompt.text, str) or not prompt.text:
                raise ValueError("prompt is empty")
            if not isinstance(prompt.answer, str | None):
                raise ValueError("answer is no text")
            prompt.text.encode("utf-8")  # lone surrogates are no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise usage_error("prompts", f"line {number} of {path} is no prompt", seen=repr(error), fix=fix) from error
        prompts.append(prompt)
    if not prompts:
        raise usage_error("prompts", f"{path} holds no prompts", fix=fix)
    there = sorted({prompt.kind for prompt in prompts})
    if missing := [kind for kind in kinds if kind not in there]:
        raise usage_error(
            "prompts", f"no prompt is of {', '.join(missing)}", wanted=", ".join(there), fix="choose kinds among them"
        )
    return [prompt for prompt in prompts if not kinds or prompt.kind in kinds][:limit]
