"""What tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eeplan.runtime import backend


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Whatever sets torch's threads does so for its own test.

    In small products threads wait for each other most of the time: all later tests would be many times
    slower.
    """
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_process() -> Iterator[backend.Backend]:
    """megatron-core's groups of a single process; a file's tests share them."""
    with backend.single_process() as here:
        yield here
