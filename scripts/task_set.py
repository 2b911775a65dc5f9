"""Makes spot_deploy/bench/sets/tasks.jsonl: small samples of licensed data sets (see SOURCES.md beside it).

The argument is a folder with gsm8k/test.jsonl, mbpp/mbpp.jsonl, humaneval/HumanEval.jsonl.gz, math500/test.jsonl and
tinystories/more_cased.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo_data

OUTPUT = Path(__file__).parents[1] / "spot_deploy" / "bench" / "sets" / "tasks.jsonl"
REASONING = ("rotate_matrix", "spiral_matrix", "manipulate_matrix", "number_sorting", "gsm_symbolic")


def rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def tasks(data: Path, count: int) -> Iterator[dict[str, str]]:
    """`count` prompts of every kind, always the same."""

    def some(path: str) -> list[dict[str, Any]]:
        return random.Random(1).sample(rows(data / path), count)

    for row in some("gsm8k/test.jsonl"):
        yield {
            "kind": "gsm8k",
            "prompt": row["question"],
            "answer": row["answer"].split("####")[1].strip(),
            "grader": "number",
        }
    for row in some("math500/test.jsonl"):
        prompt = f"{row['problem']}\n\nReason step by step, and put the final answer in \\boxed{{}}."
        yield {"kind": "math500", "prompt": prompt, "answer": row["answer"], "grader": "boxed"}
    for row in some("mbpp/mbpp.jsonl"):
        tests = [row.get("test_setup_code", ""), *row["test_list"]]
        prompt = f"{row['text']}\nThe code shall pass:\n" + "\n".join(row["test_list"])
        yield {"kind": "mbpp", "prompt": prompt, "answer": "\n".join(tests).strip(), "grader": "python"}
    for row in some("humaneval/HumanEval.jsonl.gz"):
        prompt = f"Complete this function, and give all of it:\n```python\n{row['prompt']}```"
        answer = f"{row['test']}\ncheck({row['entry_point']})"
        yield {"kind": "humaneval", "prompt": prompt, "answer": answer, "grader": "python"}
    for row in some("tinystories/more_cased.jsonl"):
        yield {"kind": "story", "prompt": "Go on with this story: " + " ".join(row["text"].split()[:24])}
    for kind in REASONING:
        yield from demo_data.generated(kind, count // 2, demo_data.HELD_OUT_SEED + 99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, default=20, help="of every kind (default 20)")
    args = parser.parse_args()
    OUTPUT.write_text("".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tasks(args.data, args.count)), "utf-8")


if __name__ == "__main__":
    main()
