"""Prompts and answers for the demo targets: reasoning-gym templates, stories, data-to-text.

Every example is a dict {kind, prompt, answer}; `answer` is what an assistant turn should hold. reasoning-gym
(Apache-2.0, PyPI) makes most of them, so that training text is unlimited and answers can be checked. From
`--data DIR` come, where present, `tinystories/*_cased.jsonl` (objects with a "text") and `e2e/*fixed*.csv` (columns
mr, ref).
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Sentences that the generators add to every question and that tell a small model nothing.
BOILERPLATE = (
    " Give the result as your final answer. Do not include units.",
    "Solve the following problem.\n\n"
    "Provide you answer as a comma-separated list of words with a space after the comma.\n\n",
    "Your task is to sort words in ascending or descending order using ASCII/Unicode ordering.\n\n"
    "Your output should be a comma-separated list of words, e.g. word_1, word_2, word_3\n\nNow, ",
    " (using ASCII/Unicode ordering) and return them as a comma-separated list",
    "\nPlease follow the instruction below:\n"
    "## 1. Let all your answers be a list of numbers."
    " Instead of reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61,"
    " use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n"
    "## 2. Convert all numbers in the square brackets as strings."
    " For example, ['-69', '-13', '1', '7', '11', '43', '59', '61']\n",
    "\nReturn the new list in the same format.",
    "Given a square matrix, your job is to rotate it clockwise.\n\n"
    "Your output should be a matrix in the same format as the input.\n\n",
    "Perform the following series of operations in order:\n- Identity transformation, i.e. no change\n- ",
)
# kind -> (share of the examples, reasoning-gym options)
GENERATED = {
    "gsm_symbolic": (0.02, {}),
    "word_sequence_reversal": (0.06, {"min_words": 4, "max_words": 9}),
    "word_sorting": (0.02, {"min_words": 3, "max_words": 6, "max_word_length": 7}),
    "number_filtering": (0.12, {"max_numbers": 8, "min_value": 10, "max_value": 99, "max_decimals": 0}),
    "number_sorting": (0.14, {"max_numbers": 8, "min_value": 10, "max_value": 99, "max_decimals": 0}),
    "rotate_matrix": (0.20, {"min_n": 3, "max_n": 5, "max_rotations": 3}),
    "spiral_matrix": (0.10, {"min_n": 3, "max_n": 5}),
    "manipulate_matrix": (
        0.26,
        {"min_rows": 3, "max_rows": 5, "min_cols": 3, "max_cols": 5, "max_transforms": 1}
        # The generator takes the exponential of weights: these make the rest of its operations rare.
        | dict.fromkeys(("w_crop", "w_remove_every_nth_row", "w_remove_every_nth_col", "w_zero_divisible"), -20.0),
    ),
}
# kind -> where its question begins, after explanations that are the same every time
BEGINNINGS = {"spiral_matrix": "For the matrix below"}
HELD_OUT_SEED = 1_000_003  # training seeds stay below it


def generated(kind: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` examples of one reasoning-gym data set; worked solutions where the data set has them."""
    import reasoning_gym

    options = GENERATED[kind][1]
    dataset = reasoning_gym.create_dataset(kind, size=count, seed=seed, **options)
    for i in range(count):
        item = dataset[i]
        question = item["question"]
        for text in BOILERPLATE:
            question = question.replace(text, "")
        question = question[question.index(BEGINNINGS.get(kind, "")) :]
        answer = item["metadata"].get("answer_cot", item["answer"])
        yield {"kind": kind, "prompt": question.strip(), "answer": answer.strip()}


def stories(data: Path) -> list[dict[str, str]]:
    """Story continuations: the first sentence is the prompt, about six more are the answer."""
    found = []
    for path in sorted((data / "tinystories").glob("*_cased.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            sentences = json.loads(line)["text"].replace("\n", " ").replace('."', '".').split(". ")
            if len(sentences) > 3:
                answer = ". ".join(sentences[1:7]).rstrip(".") + "."
                found.append({"kind": "story", "prompt": f"Go on with this story: {sentences[0]}.", "answer": answer})
    return found


def data_to_text(data: Path) -> list[dict[str, str]]:
    """E2E: attributes of a restaurant to a sentence about it."""
    found = []
    for path in sorted((data / "e2e").glob("*fixed*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found.append({"kind": "e2e", "prompt": f"Describe: {row['mr']}", "answer": row["ref"]})
    return found


def examples(count: int, seed: int, data: Path | None, held_out: bool) -> list[dict[str, str]]:
    """About `count` examples of all kinds in random order.

    Held-out examples come from another generator seed, and from every 50th story and attribute list.
    """
    pool: list[dict[str, str]] = []
    for kind, (share, _) in GENERATED.items():
        pool += generated(kind, max(1, round(count * share)), HELD_OUT_SEED + seed if held_out else seed)
    rng = random.Random(seed)
    for source, share in ((stories, 0.04), (data_to_text, 0.04)):
        items = source(data) if data else []
        keys = sorted({item["prompt"] for item in items})
        reserved = set(keys[::50])
        items = [item for item in items if (item["prompt"] in reserved) == held_out]
        rng.shuffle(items)
        pool += items[: round(count * share)]
    rng.shuffle(pool)
    return pool


def main() -> None:
    """Write prompts as JSON lines {kind, prompt, answer}."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--held-out", action="store_true", help="from seeds and texts kept out of training")
    parser.add_argument("--per-kind", type=int, help="keep at most so many of a kind")
    args = parser.parse_args()
    items = examples(args.count, args.seed, args.data, args.held_out)
    taken: Counter[str] = Counter()
    kept = []
    for item in items:
        taken[item["kind"]] += 1
        if args.per_kind is None or taken[item["kind"]] <= args.per_kind:
            kept.append(item)
    lines = (json.dumps(item) for item in kept)
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
