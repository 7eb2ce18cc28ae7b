# python ask.py http://localhost:8000 tamis.json
# python ask.py compare own.json tamis.json
"""Ask a server long questions, and compare two files of answers."""

import json
import random
import sys
from itertools import zip_longest
from pathlib import Path
from urllib.request import Request, urlopen

DOORS = 500  # a line each: several thousand tokens, more than top-k


def make_questions() -> dict[str, str]:
    """Eight long prompts, each with the five digits that should follow."""
    dice = random.Random(0)
    keys = [dice.randrange(10_000, 100_000) for _ in range(DOORS)]
    lines = [f"The key of door {n} is {key}." for n, key in enumerate(keys)]
    text = "\n".join(lines)
    asked = dice.sample(range(DOORS), 8)
    return {f"{text}\nThe key of door {n} is": str(keys[n]) for n in asked}


def ask(server: str, file: str) -> None:
    """Send all questions at once, greedily, and keep the tokens."""
    questions = make_questions()
    with urlopen(f"{server}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    wanted = {"model": model, "prompt": list(questions), "logprobs": 1}
    wanted |= {"temperature": 0, "max_tokens": 32}
    kind = {"Content-Type": "application/json"}
    body = json.dumps(wanted).encode()
    with urlopen(Request(f"{server}/v1/completions", body, kind)) as reply:
        choices = json.load(reply)["choices"]
    answers = sorted(choices, key=lambda choice: int(choice["index"]))
    right = sum(
        key in answer["text"]
        for key, answer in zip(questions.values(), answers, strict=True)
    )
    tokens = [answer["logprobs"]["tokens"] for answer in answers]
    Path(file).write_text(json.dumps(tokens))
    print(f"{right} of {len(answers)} keys are right; tokens are in {file}")


def compare(first: str, second: str) -> None:
    """Count the tokens up to the first one that differs in each answer."""
    answers = [json.loads(Path(file).read_text()) for file in (first, second)]
    equal = total = 0
    for number, (one, two) in enumerate(zip(*answers, strict=True)):
        differ = [a != b for a, b in zip_longest(one, two)]
        same = differ.index(True) if True in differ else len(differ)
        equal, total = equal + same, total + len(differ)
        if same < len(differ):
            print(f"answer {number} differs from token {same} on")
    print(f"{equal} of {total} tokens are equal")


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare(*sys.argv[2:])
    else:
        ask(*sys.argv[1:])
