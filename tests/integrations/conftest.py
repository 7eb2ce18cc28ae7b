"""A fixture for the tests of integrations: a tiny model, which is restored after each test."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The tiny model of `hf_models` that `request.param` names; every test gets, and leaves, it untouched."""
    from hf_models import built

    from tamis.integrations.transformers import detach

    found = built(request.param)
    yield found
    detach(found)
