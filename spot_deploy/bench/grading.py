"""Whether a text is a right answer to its prompt, by the way of its task."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SECONDS = 10  # for code to pass its tests
MEMORY = 1 << 30  # bytes that it may take
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(text: str, answer: str) -> bool:
    """Letter by letter, but for spaces at both ends."""
    return text.strip() == answer.strip()


def number(text: str, answer: str) -> bool:
    """The last number of the text is the last of the answer (GSM8K: what follows `####`)."""
    found, wanted = (_NUMBER.findall(t.replace("$", "")) for t in (text, answer))
    return bool(found and wanted) and float(found[-1].replace(",", "")) == float(wanted[-1].replace(",", ""))


def boxed(text: str, answer: str) -> bool:
    r"""The last `\boxed{...}` of the text is the answer, spaces aside (MATH)."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return False
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return re.sub(r"\s", "", text[begin:at]) == re.sub(r"\s", "", answer)
    return False


def python(text: str, answer: str) -> bool:
    """The text's code, then the answer's tests, run through (MBPP, HumanEval).

    The process has limits on time and memory and an empty folder; it is not kept from the network or the disk.
    """
    found = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.S)
    program = (found[1] if found else text) + "\n\n" + answer + "\n"
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))\n"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "answer.py"
        path.write_text(limits + program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-I", path], cwd=name, timeout=SECONDS, capture_output=True, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


GRADERS: dict[str, Callable[[str, str], bool]] = {"exact": exact, "number": number, "boxed": boxed, "python": python}


def grade(text: str, answer: str | None, grader: str, *, run_code: bool) -> bool | None:
    """Whether it is right; None where there is no answer, or code that may not be run."""
    if answer is None or (grader == "python" and not run_code):
        return None
    return GRADERS[grader](text, answer)
