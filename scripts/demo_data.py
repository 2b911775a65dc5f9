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
from collections.abc import Iterator
from pathlib import Path

# Sentences that the generators add to every question and that tell a small model nothing.
BOILERPLATE = (
    " Give the result as your final answer. Do not include units.",
    " Provide only the decrypted text as your final answer.",
    "Solve the following problem.\n\n"
    "Provide you answer as a comma-separated list of words with a space after the comma.\n\n",
)
# kind -> (share of the examples, reasoning-gym options)
GENERATED = {
    "gsm_symbolic": (0.60, {}),
    "word_sequence_reversal": (0.12, {"max_words": 6}),
    "number_filtering": (0.10, {"max_numbers": 6, "max_decimals": 1}),
}
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
    for source, share in ((stories, 0.10), (data_to_text, 0.08)):
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
    args = parser.parse_args()
    lines = (json.dumps(item) for item in examples(args.count, args.seed, args.data, args.held_out))
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
