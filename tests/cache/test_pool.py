"""The page allocator for programs without an engine."""

import pytest

from tamis import PagePool


def test_pool_allocates_each_page_once_and_frees_it() -> None:
    pool = PagePool(10, 4)
    pool.extend("a", 9)
    pool.extend("b", 4)
    table = pool.block_table(["a", "b"])
    held = table[table >= 0].tolist()
    assert len(held) == len(set(held)) == 4
    assert 0 not in held
    assert pool.free_pages == 5
    with pytest.raises(ValueError, match="length must be within 5 free pages"):
        pool.extend("c", 24)
    with pytest.raises(ValueError, match="end must be at most 4"):
        pool.slots("b", 0, 5)
    pool.release("a")
    assert pool.free_pages == 8


def test_names_that_are_none_are_refused_by_every_method() -> None:
    pool, name = PagePool(10, 4), ["a"]
    for call in (
        lambda: pool.extend(name, 4),
        lambda: pool.release(name),
        lambda: pool.forget(name, 4),
        lambda: pool.block_table([name]),
        lambda: pool.slots(name, 0, 0),
    ):
        with pytest.raises(TypeError, match="request must be hashable, got list; name requests by strings or numbers"):
            call()
