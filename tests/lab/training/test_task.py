"""The recall task: every question can be answered from its prompt, and only from there."""

import pytest
import torch

from tamis.lab.training import task


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("tokens", "room"), [(24, 2), (25, 2), (130, 2), (1024, 2), (64, 8), (131, 8), (1024, 8)])
def test_every_key_is_stated_once_and_asked_for_once(tokens: int, room: int, far: bool) -> None:
    batch = task.make_batch(torch.Generator("cpu").manual_seed(3), 5, tokens, far=far, room=room)
    assert batch.asked.shape[1] > 0
    places = torch.cat((batch.stated, batch.asked + 1), 1).sort(1).values
    assert (places.diff(dim=1) >= room).all()
    assert batch.tokens.shape == batch.labels.shape == (5, tokens)
    assert (batch.tokens[:, 0] == task.BOS).all()
    for prompt, labels, stated, asked in zip(batch.tokens, batch.labels, batch.stated, batch.asked, strict=True):
        keys = prompt[asked].tolist()
        assert keys == prompt[stated - 1].tolist()
        assert all(task.FIRST_KEY <= key < task.FIRST_VALUE for key in keys)
        assert all((prompt == key).sum() == 2 for key in keys)
        assert (stated < asked).all()
        if far:
            assert (asked - stated >= tokens // 2 - 2 * room).all()
        values = prompt[stated]
        assert ((values >= task.FIRST_VALUE) & (values < task.FIRST_WORD)).all()
        assert labels[asked + 1].tolist() == prompt[asked + 1].tolist() == values.tolist()
        after = asked[asked + 2 < tokens] + 2
        assert (labels[after] == task.EOS).all()
        assert int((labels != task.IGNORED).sum()) == len(asked) + len(after)


def test_answers_are_judged_at_the_keys() -> None:
    batch = task.make_batch(torch.Generator("cpu").manual_seed(0), 2, 64, pairs=4)
    logits = torch.zeros(2, 64, task.VOCABULARY, dtype=torch.float32, device="cpu")
    logits[0].scatter_(1, batch.labels[0].roll(-1).clamp_min(0)[:, None], 1.0)
    assert batch.right(logits).tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize(("tokens", "room"), [(24, 2), (25, 2), (48, 2), (512, 2), (96, 8), (97, 8), (512, 8)])
def test_a_question_has_its_answer_in_the_first_quarter_and_nowhere_else(tokens: int, room: int) -> None:
    question = task.make_question(7, tokens, room)
    prompt, key = question.prompt, question.prompt[-1]
    assert len(prompt) == tokens
    assert [place for place, token in enumerate(prompt) if token == key] == [question.needle - 1, tokens - 1]
    assert question.needle <= tokens // 4 + room
    # The other questions are left whole: each is followed by its value.
    others = [place for place, token in enumerate(prompt[:-1]) if task.FIRST_KEY <= token < task.FIRST_VALUE]
    assert all(task.FIRST_VALUE <= prompt[place + 1] < task.FIRST_WORD for place in others)
    assert question.answer == prompt[question.needle]
    assert question == task.make_question(7, tokens, room) != task.make_question(8, tokens, room)


def test_too_short_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 24, got 23"):
        task.make_question(0, 23)
    with pytest.raises(ValueError, match="at least 96, got 95"):
        task.make_question(0, 95, 8)


def test_the_vocabulary_names_every_token() -> None:
    words = task.vocabulary()
    assert len(set(words)) == task.VOCABULARY
    assert (words[task.FIRST_KEY], words[task.FIRST_VALUE], words[task.FIRST_WORD]) == ("k0", "v0", "w0")
