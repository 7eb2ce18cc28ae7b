"""The task: recall the value of a key that was stated far back among words without meaning.

A prompt begins with `<s>`. Somewhere in it stand pairs of a key and its value, `k17 v4`. When a key comes up again, the
next token is its value, and then `</s>`. Values are drawn anew for every prompt, so nothing but the prompt knows them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BOS, EOS = 0, 1
KEYS, VALUES, WORDS = 96, 64, 94
FIRST_KEY = 2
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_WORD = FIRST_VALUE + VALUES
VOCABULARY = FIRST_WORD + WORDS
CHANCE = 1 / VALUES
"""The share of right answers of somebody who guesses among all values."""
SHORTEST = 24
"""The fewest tokens of a prompt: a quarter of it holds two pairs."""
IGNORED = -100
"""The label of tokens without a loss, as in transformers."""


def vocabulary() -> list[str]:
    """The text of every token."""
    kinds = (("k", KEYS), ("v", VALUES), ("w", WORDS))
    return ["<s>", "</s>", *(f"{letter}{number}" for letter, count in kinds for number in range(count))]


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts with their questions, all int64 on the CPU."""

    tokens: Tensor
    """[B, S]"""
    labels: Tensor
    """[B, S], as transformers takes them: what should stand at a position, where that can be known."""
    stated: Tensor
    """[B, P]: the positions of the values that are asked for later."""
    asked: Tensor
    """[B, P]: the positions of the keys that ask for them."""

    @property
    def answers(self) -> Tensor:
        """[B, P]: the right answers."""
        return self.tokens.gather(1, self.stated)

    def right(self, logits: Tensor) -> Tensor:
        """bool [B, P]: whether the logits [B, S, vocabulary] give the right answers."""
        found = logits.argmax(-1).cpu()
        return found.gather(1, self.asked) == self.answers


def make_batch(
    generator: torch.Generator, count: int, tokens: int, *, pairs: int | None = None, far: bool = False, room: int = 2
) -> Batch:
    """Random prompts in which every key is stated once and asked for once.

    Args:
        generator: of the CPU.
        count: how many prompts.
        tokens: the length of each; at least `SHORTEST`.
        pairs: how many keys; by default as many as there is room for.
        far: whether all keys are stated in the first quarter and asked for in the last.
        room: how many tokens a pair has to itself, an even number.
    """
    # Pairs stand in cells of `room` tokens, all at the same place of their cell.
    cells = (tokens - 2) // room
    quarter = cells // 4
    if pairs is None:
        pairs = min(KEYS, quarter if far else cells * 2 // 5)
    keys = _shuffled(generator, count, KEYS)[:, :pairs] + FIRST_KEY
    values = draw(generator, FIRST_VALUE, FIRST_WORD, (count, pairs))
    if far:
        early, late = (_shuffled(generator, count, quarter)[:, :pairs] for _ in range(2))
        places = torch.stack((early, late + cells - quarter), dim=-1)
    else:
        places = _shuffled(generator, count, cells)[:, : 2 * pairs].view(count, pairs, 2).sort(-1).values
    places = 1 + room * places + draw(generator, 0, room, (count, 1, 1)).clamp_max(max(1, room - 2))
    drawn = draw(generator, FIRST_WORD, VOCABULARY, (count, tokens))
    drawn[:, 0] = BOS
    drawn.scatter_(1, places.flatten(1), keys.repeat_interleave(2, dim=1))
    drawn.scatter_(1, places.flatten(1) + 1, values.repeat_interleave(2, dim=1))
    asked = places[..., 1]
    # The tensor has one column more, since an answer may be the last token of its prompt.
    labels = torch.full((count, tokens + 1), IGNORED, dtype=torch.int64, device="cpu")
    labels.scatter_(1, asked + 1, values)
    labels.scatter_(1, asked + 2, EOS)
    return Batch(drawn, labels[:, :tokens], places[..., 0] + 1, asked)


def draw(generator: torch.Generator, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """Random int64 numbers from `low` to below `high`."""
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64, device="cpu")


def _shuffled(generator: torch.Generator, rows: int, count: int) -> Tensor:
    """int64 [rows, count]: the numbers below `count` in a random order in each row."""
    return torch.rand(rows, count, generator=generator, dtype=torch.float32, device="cpu").argsort(1)


def shortest(room: int) -> int:
    """The fewest tokens of a question's prompt."""
    return SHORTEST * room // 2


@dataclass(frozen=True)
class Question:
    """A prompt that ends with a key, and where the answer stands."""

    prompt: list[int]
    needle: int
    """The position of the value that the last key asks for."""

    @property
    def answer(self) -> int:
        """The token that should follow the prompt."""
        return self.prompt[self.needle]


def make_question(seed: int, tokens: int, room: int = 2) -> Question:
    """A prompt in whose first quarter keys are stated, whose last quarter asks for all but one of them, and which ends
    with the one that is left."""
    if tokens < shortest(room):
        raise ValueError(
            f"tokens must be at least {shortest(room)}, got {tokens}; a shorter prompt has no room for pairs"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    # A quarter has room for so many.
    pairs = min(16, tokens // 12, (tokens - 3) // room // 4)
    batch = make_batch(generator, 1, tokens - 1, pairs=pairs, far=True, room=room)
    prompt = batch.tokens[0].tolist()
    asked = int(batch.asked[0, 0])
    key = prompt[asked]
    prompt[asked : asked + 2] = draw(generator, FIRST_WORD, VOCABULARY, (2,)).tolist()
    prompt.append(key)
    return Question(prompt, int(batch.stated[0, 0]))
