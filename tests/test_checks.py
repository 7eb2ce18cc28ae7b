"""The argument checks themselves: whatever comes, a ValueError or TypeError that names the argument and stays short."""

import math

import numpy as np
import pytest
import torch

from tamis import IndexRecipe, PagedCache, checks

HUGE = (2**31, 2**63, 10**400, 10**5000)
LONGEST = 1000


def kind_of(value: object) -> str:
    """For the names of tests: integers of thousands of digits have no text."""
    return type(value).__name__


class Odd:
    """An object that is nothing in particular."""


class Unprintable:
    """An object whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    "received",
    [10**400, -(10**400), 10**5000, "x" * 10**6, list(range(10**5)), [10**5000], Unprintable(), torch.zeros(10**5)],
    ids=["int", "negative", "unprintable int", "text", "list", "list of ints", "object", "tensor"],
)
@pytest.mark.parametrize("wording", [checks.refuse, checks.refuse_type])
def test_a_refusal_is_short_whatever_came(wording, received: object) -> None:
    text = str(wording("pages", "something else", received, "pass it"))
    assert text.startswith("pages must be something else, got ")
    assert text.endswith("; pass it")
    assert len(text) < LONGEST


def test_a_refusal_shows_small_values_as_they_are() -> None:
    for received, text in (
        (3, "3"),
        ([1, 2], "[1, 2]"),
        ("'a'", "'a'"),
        (None, "None"),
        (0.5, "0.5"),
        (-(2**63), f"{-(2**63)}"),
    ):
        assert str(checks.refuse("a", "b", received, "c")) == f"a must be b, got {text}; c"
    assert "int32 [2] on cpu" in str(checks.refuse("a", "b", torch.zeros(2, dtype=torch.int32), "c"))


@pytest.mark.parametrize("value", [*HUGE, -(10**400)], ids=kind_of)
def test_integers_have_bounds_where_none_are_given(value: int) -> None:
    with pytest.raises(ValueError, match=r"^rows must be"):
        checks.integer("rows", value, low=0)
    with pytest.raises(ValueError, match=r"^rows must be"):
        checks.integer("rows", value)


def test_integers_that_are_no_32_bit_numbers_say_so() -> None:
    assert checks.integer("bytes", 2**40, low=1, high=checks.INT64_MAX) == 2**40
    assert checks.integer("rows", 2**31 - 1, low=0) == 2**31 - 1
    with pytest.raises(ValueError, match=r"bytes must be between 1 and 9223372036854775807, got 9223372036854775808$"):
        checks.integer("bytes", 2**63, low=1, high=checks.INT64_MAX)
    with pytest.raises(ValueError, match=r"rows must be >= 0, got -1$"):
        checks.integer("rows", -1, low=0)
    with pytest.raises(ValueError, match=r"rows must be between 0 and 2147483647, got 2147483648$"):
        checks.integer("rows", 2**31, low=0)


@pytest.mark.parametrize("value", [True, 2.0, "3", None, np.int64(3), torch.tensor(3), Odd()])
def test_only_plain_integers_are_integers(value: object) -> None:
    with pytest.raises(TypeError, match=r"^k must be an int"):
        checks.integer("k", value, low=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, 0.0, -1.0, -1e-30, -(10**400)])
def test_positive_numbers_are_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"^eps must be finite and > 0, got"):
        checks.positive_number("eps", value)


@pytest.mark.parametrize("value", [1e39, 1e308, 10**39, 10**400, 10**5000, 1e-39, 1e-320], ids=kind_of)
def test_positive_numbers_are_numbers_in_float32(value: float) -> None:
    # In float32, where the kernels compute, they would be infinite, zero, or lose their digits.
    with pytest.raises(ValueError, match=r"^eps must be a normal number in float32"):
        checks.positive_number("eps", value)


def test_numbers_pass_as_floats() -> None:
    for value in (1, 1e-6, 2.0**-126, 3.4e38, np.float64(0.5)):
        assert checks.positive_number("eps", value) == float(value)
        assert isinstance(checks.positive_number("eps", value), float)
    assert checks.number("mscale", 0, low=0.0) == 0.0
    for value in (math.nan, math.inf, -math.inf, 10**400, 1e39, -1.0):
        with pytest.raises(ValueError, match=r"^mscale must be finite and >= 0"):
            checks.number("mscale", value, low=0.0)
    for odd in (True, "1", None, 1j, torch.tensor(1.0), np.float32(1)):
        with pytest.raises(TypeError, match=r"^mscale must be a number"):
            checks.number("mscale", odd)
        with pytest.raises(TypeError, match=r"^eps must be a number"):
            checks.positive_number("eps", odd)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(math.nan), torch.tensor([-1.0]), torch.tensor(0.0), torch.tensor(math.inf), 10**400],
    ids=kind_of,
)
def test_scale_factors_on_the_host_are_looked_at(value: object) -> None:
    with pytest.raises(ValueError, match=r"^q_scale must be"):
        checks.scale_factor("q_scale", value)


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(()).double(), torch.ones(1).to_sparse(), "1", None, [1.0]])
def test_scale_factors_of_another_kind(value: object) -> None:
    with pytest.raises(TypeError, match=r"^q_scale must be"):
        checks.scale_factor("q_scale", value)


def test_only_dense_tensors_are_tensors() -> None:
    dense = torch.ones(2, 3)
    checks.tensor("q", dense, "T D", checks.FLOATS)
    for other in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_mkldnn()):
        with pytest.raises(TypeError, match=r"^q must be a dense tensor"):
            checks.tensor("q", other, "T D", checks.FLOATS)
    for dtype in (torch.complex64, torch.bool, torch.int8, torch.float64):
        with pytest.raises(TypeError, match=r"^q must be bfloat16 or float16 or float32, got"):
            checks.tensor("q", dense.to(dtype), "T D", checks.FLOATS)


def test_objects_are_of_their_class() -> None:
    recipe = IndexRecipe()
    assert checks.instance("recipe", recipe, IndexRecipe) is recipe
    for other in (None, "recipe", 3, Odd(), IndexRecipe, {}, torch.zeros(1)):
        with pytest.raises(TypeError, match=r"^recipe must be an IndexRecipe, got"):
            checks.instance("recipe", other, IndexRecipe)
    with pytest.raises(TypeError, match=r"^cache must be a PagedCache, got dict; make one with PagedCache.wrap"):
        checks.instance("cache", {}, PagedCache, "make one with PagedCache.wrap")


@pytest.mark.parametrize("value", [1, 0, None, "yes", torch.ones(2), np.bool_(True), [True]])
def test_flags_are_bools(value: object) -> None:
    with pytest.raises(TypeError, match=r"^compact must be True or False, got"):
        checks.flag("compact", value)


@pytest.mark.parametrize("value", [[], {}, 3, None, np.array(["e", "2"]), torch.ones(2), b"e", Odd()])
def test_options_of_another_kind(value: object) -> None:
    with pytest.raises(TypeError, match=r"^lse_base must be one of 'e', '2', got"):
        checks.option("lse_base", value, ("e", "2"))


def test_options() -> None:
    assert checks.option("lse_base", "2", ("e", "2")) == "2"
    with pytest.raises(ValueError, match=r"^lse_base must be one of 'e', '2', got 'xxx") as caught:
        checks.option("lse_base", "x" * 10**6, ("e", "2"))
    assert len(str(caught.value)) < LONGEST


@pytest.mark.parametrize("value", [None, 3, 1.5, b"cpu", Odd(), [], torch.zeros(1)])
def test_devices_of_another_kind(value: object) -> None:
    with pytest.raises(TypeError, match=r"^device must be a torch.device or its name, got"):
        checks.device("device", value)


def test_devices() -> None:
    assert checks.device("device", "cpu") == checks.device("device", torch.device("cpu")) == torch.device("cpu")
    assert checks.device("device", "meta", usable=True) == torch.device("meta")
    for value in ("", "nonsense", "cuda:x", "cpu:", "x" * 10**6):
        with pytest.raises(ValueError, match=r"^device must be") as caught:
            checks.device("device", value)
        assert len(str(caught.value)) < LONGEST
    for value in ("cuda:99", "mps", "privateuseone"):
        with pytest.raises(ValueError, match=r"^device must be one that this machine has, got"):
            checks.device("device", value, usable=True)


def test_rows_of_angles_that_are_used_are_finite() -> None:
    table = torch.ones(4, 2)
    table[2, 0] = math.nan
    table[3, 1] = -math.inf
    checks.finite_rows("cos_sin", table, torch.tensor([0, 1, -1]))
    with pytest.raises(ValueError, match=r"^cos_sin must be at least one row long, got \[0, 2\]"):
        checks.finite_rows("cos_sin", table[:0], torch.tensor([-1, -5]))
    for bad in (2, 3):
        with pytest.raises(ValueError, match=f"^cos_sin must be finite, got NaN or infinity in row {bad}"):
            checks.finite_rows("cos_sin", table, torch.tensor([0, bad, -1]))
    checks.finite_rows("cos_sin", table.to("meta"), torch.tensor([0]))
