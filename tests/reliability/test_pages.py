"""Pools and batches: nothing is handed out twice, and what is refused leaves nothing behind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis import Batch, LayerSpec, Limits, PageMap, PagePool, Planner


def pool(pages: int = 8, size: int = 4) -> PagePool:
    return PagePool(pages, size, seed=3)


def state(*pools: PagePool) -> list[object]:
    return [(list(p._free), {name: list(held) for name, held in p._held.items()}) for p in pools]


def test_a_refused_extension_leaves_nothing_behind() -> None:
    some = pool()
    some.extend("a", 9)
    before = state(some)
    for name, length in (("a", 99), ("b", 99)):
        with pytest.raises(ValueError, match="length must be within 4 free pages"):
            some.extend(name, length)
    with pytest.raises(ValueError, match="length must be >= 0"):
        some.extend("b", -1)
    with pytest.raises(TypeError, match="length must be an int"):
        some.extend("b", 1.5)  # type: ignore[arg-type]
    assert state(some) == before


def test_a_batch_that_does_not_fit_leaves_nothing_behind() -> None:
    """If the third request does not fit into the second pool, no pool gives a page to the first two."""
    main, other = pool(40), pool(6)
    Batch.build([2], [2], main, requests=["held"], other_pools={"window": other})
    before = state(main, other)
    with pytest.raises(ValueError, match=r"^window must be of at least 6 free pages, got 4; release requests"):
        Batch.build([8, 8, 8], [8, 8, 8], main, requests=list("abc"), other_pools={"window": other})
    assert state(main, other) == before
    with pytest.raises(ValueError, match=r"^pool must be of at least 50 free pages, got 38"):
        Batch.build([8, 8], [100, 100], main, other_pools={"window": other})
    assert state(main, other) == before
    Batch.build([8, 8], [8, 8], main, requests=list("ab"), other_pools={"window": other})
    assert other.free_pages == 0


BAD_BATCHES: dict[str, tuple[Callable[[PagePool], Any], type[Exception], str]] = {
    "named twice": (
        lambda p: Batch.build([1, 1], [1, 1], p, requests=["a", "a"]),
        ValueError,
        r"^requests must be different names, got 'a' twice; one name stands for one request",
    ),
    "too few names": (
        lambda p: Batch.build([1, 1], [1, 1], p, requests=["a"]),
        ValueError,
        "^requests must be 2 names, one per length, got 1",
    ),
    "too few queries": (lambda p: Batch.build([1], [1, 1], p), ValueError, "^query_lengths must be 2 numbers, .*got 1"),
    "query too long": (
        lambda p: Batch.build([1, 4], [1, 3], p),
        ValueError,
        r"^query_lengths\[1\] must be between 0 and 3, got 4",
    ),
    "negative query": (lambda p: Batch.build([-1], [3], p), ValueError, r"^query_lengths\[0\] must be between 0 and 3"),
    "negative length": (lambda p: Batch.build([0], [-1], p), ValueError, r"^lengths\[0\] must be >= 0, got -1"),
    "fractions": (lambda p: Batch.build([1], [1.0], p), TypeError, r"^lengths\[0\] must be an int"),  # type: ignore[list-item]
    "forgotten": (
        lambda p: Batch.build([6], [9], p, requests=["old"]),
        ValueError,
        r"^start must be in a page that was not freed by forget, got 3",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches_take_no_pages(case: str) -> None:
    build, kind, message = BAD_BATCHES[case]
    some = pool()
    some.extend("old", 8)
    some.forget("old", 4)
    before = state(some)
    with pytest.raises(kind, match=message):
        build(some)
    assert state(some) == before


BAD_POOL_CALLS: dict[str, tuple[Callable[[PagePool], Any], type[Exception], str]] = {
    "negative start": (lambda p: p.slots("a", -3, 2), ValueError, r"^start must be between 0 and 2, got -3"),
    "start behind end": (lambda p: p.slots("a", 3, 2), ValueError, r"^start must be between 0 and 2, got 3"),
    "negative end": (lambda p: p.slots("a", 0, -1), ValueError, r"^end must be >= 0, got -1"),
    "past the pages": (
        lambda p: p.slots("a", 0, 13),
        ValueError,
        r"^end must be at most 12, got 13; call extend",
    ),
    "fraction": (lambda p: p.slots("a", 0.0, 2), TypeError, r"^start must be an int, got float"),  # type: ignore[arg-type]
    "tensor": (lambda p: p.slots("a", 0, torch.tensor(2)), TypeError, r"^end must be an int"),  # type: ignore[arg-type]
    "forgotten": (
        lambda p: p.slots("a", 3, 9),
        ValueError,
        r"^start must be in a page that was not freed by forget, got 3",
    ),
    "narrow table": (lambda p: p.block_table(["a"], 2), ValueError, r"^width must be at least 3 pages, .*got 2"),
    "no width": (lambda p: p.block_table(["a"], "3"), TypeError, r"^width must be an int"),  # type: ignore[arg-type]
    "forget": (lambda p: p.forget("a", 1.5), TypeError, r"^before must be an int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD_POOL_CALLS)
def test_bad_calls_of_a_pool_change_nothing(case: str) -> None:
    call, kind, message = BAD_POOL_CALLS[case]
    some = pool()
    some.extend("a", 9)
    some.forget("a", 4)
    before = state(some)
    with pytest.raises(kind, match=message):
        call(some)
    assert state(some) == before


def test_what_a_pool_says_of_requests_it_does_not_know() -> None:
    some = pool()
    assert some.slots("nobody", 0, 0).tolist() == []
    assert some.block_table(["nobody"]).tolist() == [[-1]]
    some.forget("nobody", 9)
    some.release("nobody")
    assert state(some) == state(pool())


def test_the_slots_of_any_range_and_the_tables_of_any_width() -> None:
    some = pool()
    some.extend("a", 9)
    some.extend("b", 1)
    table = some.block_table(["b", "a"], 5)
    assert table.dtype == torch.int32
    assert table.shape == (2, 5)
    pages = table[1, :3].tolist()
    assert table[1, 3:].eq(-1).all()
    assert table[0, 1:].eq(-1).all()
    for start in range(13):
        for end in range(start, 13):
            expected = [pages[p // 4] * 4 + p % 4 for p in range(start, end)]
            found = some.slots("a", start, end)
            assert found.dtype == torch.int64
            assert found.tolist() == expected


def test_forgotten_pages_are_handed_out_again_once() -> None:
    some = pool(5)
    some.extend("a", 12)
    first, second, third = some.block_table(["a"])[0].tolist()
    some.forget("a", 7)  # position 4 to 7 share a page, and 7 is still needed
    assert some.block_table(["a"])[0].tolist() == [-1, second, third]
    some.forget("a", -5)
    some.forget("a", 8)
    some.forget("a", 8)
    assert some.block_table(["a"])[0].tolist() == [-1, -1, third]
    assert sorted(some._free) == sorted({1, 2, 3, 4} - {third})
    assert some.slots("a", 8, 12).tolist() == [third * 4 + n for n in range(4)]
    some.extend("a", 13)  # the forgotten pages still count as positions
    assert some.block_table(["a"])[0].tolist()[:3] == [-1, -1, third]
    some.release("a")
    assert sorted(some._free) == [1, 2, 3, 4]
    assert first != second


def planner(**changes: Any) -> Planner:
    numbers: dict[str, Any] = {"max_tokens": 16, "max_requests": 4, "max_length": 64, "page_size": 4}
    return Planner(LayerSpec(2, 16, 8, 16, topk=4), Limits(**numbers | changes), layout="v32-bf16")


def test_a_pool_of_another_page_size_is_refused() -> None:
    """A pool of 16 under limits of 64 was accepted, and one request read another's rows."""
    made = planner(other_page_sizes={"window": 8})
    good = Batch.build([3], [3], pool(), other_pools={"window": pool(8, 8)})
    assert (good.pages.page_size, good.other_pages["window"].page_size) == (4, 8)
    made.plan(good)
    with pytest.raises(ValueError, match=r"^pages\.page_size must be 4, the planner's, got 16; make the pool"):
        made.plan(Batch.build([3], [3], pool(8, 16), other_pools={"window": pool(8, 8)}))
    with pytest.raises(ValueError, match=r"^window\.page_size must be 8, the planner's, got 4"):
        made.plan(Batch.build([3], [3], pool(), other_pools={"window": pool()}))
    unsaid = PageMap(good.pages.block_table, good.pages.slots)
    assert unsaid.page_size is None
    made.plan(replace(good, pages=unsaid))


def test_a_table_too_narrow_for_its_lengths_is_refused() -> None:
    """Rows behind it would be skipped without a word. A bound of lengths may be longer than the table."""
    made = planner()
    good = Batch.build([3], [9], pool())
    narrow = replace(good, pages=replace(good.pages, block_table=good.pages.block_table[:, :2]))
    with pytest.raises(ValueError, match=r"^pages\.block_table must be at least 3 pages wide for 9 tokens, got 2"):
        made.plan(narrow)
    made.plan(replace(narrow, lengths=torch.tensor([8], dtype=torch.int32)))
    made.plan(replace(narrow, host_lengths=torch.tensor([9], dtype=torch.int32)))


def test_a_pool_may_have_any_name_but_the_empty_one() -> None:
    """The main pool was not looked at beside another one of the name that stands for it in messages."""
    with pytest.raises(ValueError, match=r"^pool must be of at least 9 free pages, got 7"):
        Batch.build([33], [33], pool(), other_pools={"pool": pool(20)})
    with pytest.raises(ValueError, match=r"^other_page_sizes must be by names that are not empty, got ''"):
        planner(other_page_sizes={"": 8})


@pytest.mark.parametrize("field", ["lengths", "pages.block_table", "pages.slots"])
def test_tensors_on_another_device_are_refused(field: str) -> None:
    good = Batch.build([3], [3], pool())
    name = field.rpartition(".")[2]
    holder: Any = good.pages if "." in field else good
    spoiled = replace(holder, **{name: getattr(holder, name).to("meta")})
    changes = {"pages": spoiled} if "." in field else {"lengths": spoiled.lengths, "host_lengths": good.lengths}
    with pytest.raises(ValueError, match=f"^{field} must be on cpu or the host, got meta"):
        planner().plan(replace(good, **changes))


def test_a_shorter_length_and_an_empty_range_ask_for_nothing() -> None:
    some = pool()
    some.extend("a", 12)
    some.forget("a", 4)
    before = state(some)
    some.extend("a", 1)
    assert some.missing("a", 1) == 0
    assert some.slots("a", 3, 3).tolist() == []  # a paused request, whose page is gone
    assert Batch.build([0], [3], some, requests=["a"]).pages.slots.tolist() == []
    assert state(some) == before
