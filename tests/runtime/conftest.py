"""What tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eeplan.runtime import backend


@pytest.fixture(scope="module")
def one_process() -> Iterator[backend.Backend]:
    """megatron-core's groups of a single process; a file's tests share them."""
    with backend.single_process() as here:
        yield here
