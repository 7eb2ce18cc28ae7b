"""Calls that are remembered launch what they would launch if nothing were remembered.

Between two calls one property changes at a time. The second call must launch the same kernels with the same parameters,
or be refused with the same error, as in a process that has not seen the first.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from pretended import Pretended
from remembered import (
    Change,
    Given,
    added,
    calls_of,
    compare,
    in_place,
    indexing,
    ints,
    named_tensors,
    outcome,
    paged,
    run_index,
    run_translate,
    run_write,
    shifted,
    translating,
    unaligned_cache,
    widened,
    with_gaps,
    writing,
)
from settings import autocast, default_dtype
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.ops import attend, memory
from tamis.ops.attention import triton_kernels as portable

pytestmark = pytest.mark.own_settings("changes settings itself")
BF16 = torch.bfloat16


# --- attend ---------------------------------------------------------------------------------------------------------


def attention(tokens: int = 3, heads: int = 16, columns: int = 640, **more: Any) -> Given:
    given = {"q": torch.zeros(tokens, heads, 576, dtype=BF16), "cache": paged(), "slots": ints(tokens, columns)}
    return given | {"scale": 0.1, "value_dim": 512} | more


def run_attend(given: Given) -> Any:
    given = dict(given)
    names = ("cache", "slots", "lengths", "request_ids", "block_table")
    selection = {name: given.pop(name) for name in names if name in given}
    selections = [Selection(**selection), *given.pop("others", [])]
    return attend(given.pop("q"), selections, **given)


def out_of(given: Given, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*given["q"].shape[:2], 512, dtype=dtype)


ATTEND: dict[str, Change] = {
    "nothing": lambda given: given,
    "more tokens": lambda given: given | attention(5),
    "one token": lambda given: given | attention(1),
    "no token": lambda given: given | attention(0),
    "heads": lambda given: given | attention(heads=8),
    "many heads": lambda given: given | attention(200, 64),
    "many tokens": lambda given: given | attention(140),
    "columns": lambda given: given | attention(columns=64),
    "fp16": in_place("q", Tensor.half),
    "query with gaps": in_place("q", widened),
    "query 8 bytes off": in_place("q", lambda q: shifted(q, 4)),
    "query 2 bytes off": in_place("q", lambda q: shifted(q, 1)),
    "query with a gradient": in_place("q", lambda q: q.clone().requires_grad_()),
    "query elsewhere": in_place("q", lambda q: q.to("meta")),
    "query of a wrong width": in_place("q", lambda q: q[..., :512]),
    "no tensor": added(q=3),
    "a list": added(q=[1.0]),
    "sparse query": in_place("q", lambda q: q[0].to_sparse()),
    "bf16 rows": added(cache=lambda: paged("v32-bf16")),
    "pages": added(cache=lambda: paged(pages=9)),
    "page size": added(cache=lambda: paged(page_size=16)),
    "pages with gaps": added(cache=with_gaps),
    "slots with gaps": in_place("slots", widened),
    "slots turned": in_place("slots", lambda slots: slots.t().contiguous().t()),
    "slots int64": in_place("slots", Tensor.long),
    "slots of another length": in_place("slots", lambda slots: slots[:2]),
    "slots elsewhere": in_place("slots", lambda slots: slots.to("meta")),
    "lengths": added(lengths=lambda: ints(3)),
    "lengths 4 bytes off": added(lengths=lambda: ints(4)[1:]),
    "lengths with gaps": added(lengths=lambda: ints(6)[::2]),
    "positions": added(request_ids=lambda: ints(3), block_table=lambda: ints(2, 9)),
    "positions in a wider table": added(request_ids=lambda: ints(3), block_table=lambda: ints(2, 12)[:, :9]),
    "request ids alone": added(request_ids=lambda: ints(3)),
    "sink": added(sink=lambda: torch.zeros(16)),
    "sink of one number": added(sink=lambda: torch.zeros(1).expand(16)),
    "sink of wrong length": added(sink=lambda: torch.zeros(15)),
    "splits": added(splits=2),
    "one split": added(splits=1),
    "splits True": added(splits=True),
    "splits 2.0": added(splits=2.0),
    "value_dim as a float": added(value_dim=512.0),
    "value_dim too large": added(value_dim=577),
    "scale": added(scale=0.7),
    "a negative scale": added(scale=-0.7),
    "a scale of True": added(scale=True),
    "a scale beyond float32": added(scale=1e30, q_scale=1e30),
    "query scale": added(q_scale=0.25),
    "query scale in memory": added(q_scale=lambda: torch.tensor(0.25)),
    "base 2": added(lse_base="2"),
    "no base": added(lse_base="10"),
    "backend": added(backend="hopper"),
    "no backend": added(backend="magic"),
    "backend that cannot be hashed": added(backend=[]),
    "given output": lambda given: given | {"out": out_of(given)},
    "given float32 output": lambda given: given | {"out": out_of(given, torch.float32)},
    "given output with gaps": lambda given: given | {"out": widened(out_of(given))},
    "output with a gradient": lambda given: given | {"out": out_of(given).requires_grad_()},
    "output of a wrong shape": lambda given: given | {"out": out_of(given)[:, :4]},
    "output in the query": lambda given: given | {"out": given["q"][..., :512]},
    "output in the slots": lambda given: given | {"out": given["slots"].view(-1).view(BF16)[:0].view(0, 16, 512)},
}


@pytest.mark.parametrize("name", ATTEND)
def test_attend(pretended: Pretended, name: str) -> None:
    base = attention()
    compare(pretended, run_attend, base, ATTEND[name](dict(base)))


V4: dict[str, Change] = {
    "nothing": lambda given: given,
    "tokens": lambda given: given | many_heads(7),
    "heads": lambda given: given | many_heads(heads=128),
    "one selection": lambda given: {name: value for name, value in given.items() if name != "others"},
    "lengths": added(lengths=lambda: ints(4)),
    "query 8 bytes off": in_place("q", lambda q: shifted(q, 4)),
    "other columns": lambda given: given | {"others": [Selection(paged("v4-fp8"), ints(4, 1024))]},
    "other lengths": lambda given: given | {"others": [Selection(paged("v4-fp8"), ints(4, 512), ints(4))]},
    "sink": added(sink=lambda: torch.zeros(64)),
    "given output": lambda given: given | {"out": out_of(given)},
}


def many_heads(tokens: int = 4, heads: int = 64) -> Given:
    others = [Selection(paged("v4-fp8"), ints(tokens, 512))]
    given = {"q": torch.zeros(tokens, heads, 512, dtype=BF16), "cache": paged("v4-fp8"), "slots": ints(tokens, 128)}
    return given | {"others": others, "scale": 0.1, "value_dim": 512}


@pytest.mark.parametrize("name", V4)
def test_attend_over_two_selections(pretended: Pretended, name: str) -> None:
    base = many_heads()
    compare(pretended, run_attend, base, V4[name](dict(base)))


def test_rows_that_are_not_aligned_are_left_to_other_kernels(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both caches have one signature, since it has no addresses."""
    lse = torch.zeros(3, 16)
    monkeypatch.setattr(portable, "attend", lambda call: (lse, lse))
    base = attention()
    for _ in range(2):
        run_attend(base)
    assert {one.kernel for one in pretended.launches()} == {"attend_few_heads", "merge_splits"}
    assert run_attend(base | {"cache": unaligned_cache()}).lse is lse
    assert not pretended.launches()
    assert run_attend(base).lse is not lse


def test_an_output_is_separate_from_inputs_in_every_call(pretended: Pretended) -> None:
    """Signatures have no addresses, so that these outputs have the same one."""
    given = attention()
    room, lists = torch.zeros_like(given["q"]), torch.zeros(3, 16, 512, dtype=BF16)
    slots = torch.zeros(3, 16, 512, dtype=BF16).view(-1)[: 3 * 640 * 2].view(torch.int32).view(3, 640)
    for _ in range(2):
        run_attend(given | {"out": room[..., :512]})
        run_attend(given | {"out": lists, "slots": slots})
        with pytest.raises(ValueError, match="out must be separate from all inputs and caches"):
            run_attend(given | {"out": given["q"][..., :512]})
        inside = slots.view(-1).view(BF16).as_strided((3, 16, 512), (8192, 512, 1))
        with pytest.raises(ValueError, match="out must be separate from all inputs and caches"):
            run_attend(given | {"out": inside, "slots": slots})


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: autocast(True),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("first", [True, False], ids=["set first", "set then"])
def test_settings_may_change_between_calls(pretended: Pretended, setting: str, first: bool) -> None:
    calls = [(run_attend, attention()), (run_write, writing()), (run_index, indexing())]
    calls.append((run_attend, attention() | {"out": out_of(attention())}))
    for run, given in calls:
        inside, outside = SETTINGS[setting], nullcontext
        pretended.remembers = False
        with outside() if first else inside():
            expected = outcome(pretended, run, given)
        pretended.remembers = True
        with inside() if first else outside():
            outcome(pretended, run, given)
        for _ in range(2):
            with outside() if first else inside():
                assert outcome(pretended, run, given) == expected
        pretended.forget()


def test_a_query_on_the_current_device_may_not_be_where_the_rows_are(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = attention()
    for _ in range(2):
        run_attend(base)
    monkeypatch.setattr(memory, "remembered_on", lambda tensor: True)  # whichever device is the current one
    with pytest.raises(ValueError, match=r"selections\[0\].cache must be on meta like q"):
        run_attend(base | {"q": base["q"].to("meta")})


def test_a_query_that_needs_a_gradient_is_refused_only_where_that_matters(pretended: Pretended) -> None:
    given = attention()
    given["q"].requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            run_attend(given)
        with pytest.raises(ValueError, match="q must be without gradient"):
            run_attend(given)


def test_memory_made_in_inference_mode_is_refused_outside(pretended: Pretended) -> None:
    with torch.inference_mode():
        frozen = {"out": torch.zeros(3, 16, 512, dtype=BF16)}
        storage = torch.zeros_like(paged().storage)
    cache = PagedCache.wrap(storage, "v32-fp8")
    for _ in range(2):
        run_attend(attention() | {"out": out_of(attention())})
        run_write(writing())
        with torch.inference_mode():
            run_attend(attention() | frozen)
            run_write(writing() | {"cache": cache})
        with pytest.raises(ValueError, match="out must be a tensor that may be written here"):
            run_attend(attention() | frozen)
        with pytest.raises(ValueError, match="cache must be a tensor that may be written here"):
            run_write(writing() | {"cache": cache})


# --- the memory -----------------------------------------------------------------------------------------------------


def test_a_full_memory_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST", 3)
    held: memory.Memory[int] = memory.Memory()
    for number in range(3):
        held.keep((number,), number)
    assert [held.find((number,)) for number in range(3)] == [0, 1, 2]
    held.keep((3,), 3)
    assert [held.find((number,)) for number in range(4)] == [None, None, None, 3]
    held.keep((4,), None)
    assert held.find((4,)) is None
    assert held.find(None) is None
    assert held.find(([],)) is None
    memory.forget_all()
    assert held.find((3,)) is None


def test_calls_on_the_host_are_not_remembered() -> None:
    assert not memory.remembered_on(torch.zeros(1))
    assert not memory.remembered_on(torch.zeros(1, device="meta"))


def test_nothing_keeps_the_tensors_of_a_call(pretended: Pretended) -> None:
    calls = [(run_attend, attention() | {"sink": torch.zeros(16), "out": out_of(attention())})]
    calls += [(run_attend, many_heads()), (run_write, writing()), (run_index, indexing())]
    alive = [weakref.ref(tensor) for _, given in calls for tensor in named_tensors(given).values()]
    for run, given in calls:
        run(given)
        run(given)
    calls = run = given = None
    gc.collect()
    assert not [one for one in alive if one() is not None]


MOST_CALLS = {"attend": 56, "attend into out": 70, "write_kv": 36, "translate_positions": 40}
MOST_CALLS |= {"index_topk": 52, "index_topk into out": 70}
"""Calls of functions that a remembered call may make, those of torch included. Each costs 0.1 us and more."""


def test_a_remembered_call_does_little(pretended: Pretended) -> None:
    doors = {"attend": (run_attend, attention()), "attend into out": (run_attend, attention())}
    doors |= {"write_kv": (run_write, writing()), "index_topk": (run_index, indexing())}
    doors["index_topk into out"] = (run_index, indexing() | {"out": torch.zeros(4, 64, dtype=torch.int32)})
    doors["translate_positions"] = (run_translate, translating())
    doors["attend into out"][1].update(out=out_of(attention()), sink=torch.zeros(16))
    with torch.no_grad():
        found = {name: calls_of(*door) for name, door in doors.items()}
    assert {name: count for name, count in found.items() if count > MOST_CALLS[name]} == {}
    with torch.device("meta"), torch.no_grad():
        assert {name: calls_of(*door) for name, door in doors.items()} == found, "a default device costs nothing"
