# mypy: disable-error-code="untyped-decorator"
"""Compiled loop behind ``fill_search``: when each stage is done with a filled 1F1B schedule.

The same order as ``fill.filled``, without making it: warm-up forwards of all microbatches that pass all
stages, each stage's last one before its first backward included; the inserts of region A, forward deepest
first and back in reverse; then rounds of one backward and one forward, truncated backwards left out. Every op
comes after those it waits for, and a stage's last message on a link arrives when that link is free again, so
one number per stage and direction is all to keep.

Importing this module costs the import of numba, so it is imported on the first call.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Nanoseconds = NDArray[np.int64]

FORWARD, BACKWARD, TURN_FORWARD, TURN_BACKWARD, BARE_FORWARD, BEFORE_GRADIENT, MESSAGE = range(7)
"""Rows of the cost table; MESSAGE is the link to the next stage."""
CLOCK, HIDDEN_SENT, GRADIENT_SENT = range(3)
"""Rows of the state: a stage's clock, and when its last message to the next and previous stage arrives."""


@njit(cache=True)
def asynchronous(
    costs: Nanoseconds, num_full: int, depths: NDArray[np.int64], reaches: NDArray[np.int64]
) -> Nanoseconds:
    """End of each stage's last op [P], with asynchronous messages.

    Args:
        costs: [7, P].
        depths: [K_A], non-increasing.
        reaches: [K_B], non-increasing.
    """
    num_stages = costs.shape[1]
    through = num_full + len(reaches)
    state = np.zeros((3, num_stages), np.int64)
    for microbatch in range(min(num_stages, through)):
        for stage in range(num_stages):
            if microbatch < min(num_stages - stage, through):
                row = _forward_row(microbatch, stage, num_full, reaches, num_stages)
                _forward(state, costs, stage, row)
                # The next stage wants its input now, or only after its own first backward.
                if microbatch < min(num_stages - stage - 1, through):
                    _send(state, costs, stage)
    for depth in depths:
        for stage in range(depth):
            turns = stage == depth - 1
            _forward(state, costs, stage, TURN_FORWARD if turns else FORWARD)
            if not turns:
                _send(state, costs, stage)
    for index in range(len(depths) - 1, -1, -1):
        for stage in range(depths[index] - 1, -1, -1):
            turns = stage == depths[index] - 1
            _backward(state, costs, stage, TURN_BACKWARD if turns else BACKWARD, not turns, stage > 0)
    for stage in range(num_stages - 1):
        if min(num_stages - stage, through) > min(num_stages - stage - 1, through):
            _send(state, costs, stage)
    for microbatch in range(through):
        for stage in range(num_stages - 1, -1, -1):
            first = 0
            if microbatch >= num_full:
                first = num_stages - reaches[microbatch - num_full]
            if stage >= first:
                _backward(state, costs, stage, BACKWARD, stage < num_stages - 1, stage > first)
            following = min(num_stages - stage, through) + microbatch
            if following < through:
                _forward(state, costs, stage, _forward_row(following, stage, num_full, reaches, num_stages))
                _send(state, costs, stage)
    clock: Nanoseconds = state[CLOCK]
    return clock


@njit(inline="always")
def _forward_row(
    microbatch: int, stage: int, num_full: int, reaches: NDArray[np.int64], num_stages: int
) -> int:
    if microbatch >= num_full and stage < num_stages - reaches[microbatch - num_full]:
        return BARE_FORWARD
    return FORWARD


@njit(inline="always")
def _forward(state: Nanoseconds, costs: Nanoseconds, stage: int, row: int) -> None:
    start = state[CLOCK, stage]
    if stage > 0:
        start = max(start, state[HIDDEN_SENT, stage - 1])
    state[CLOCK, stage] = start + costs[row, stage]


@njit(inline="always")
def _send(state: Nanoseconds, costs: Nanoseconds, stage: int) -> None:
    """The hidden states of the stage's last forward, to the next stage."""
    if stage < costs.shape[1] - 1:
        free = max(state[CLOCK, stage], state[HIDDEN_SENT, stage])
        state[HIDDEN_SENT, stage] = free + costs[MESSAGE, stage]


@njit(inline="always")
def _backward(
    state: Nanoseconds, costs: Nanoseconds, stage: int, row: int, receives: bool, sends: bool
) -> None:
    start = state[CLOCK, stage]
    if receives:
        start = max(start, state[GRADIENT_SENT, stage + 1] - costs[BEFORE_GRADIENT, stage])
    state[CLOCK, stage] = start + costs[row, stage]
    if sends:
        free = max(state[CLOCK, stage], state[GRADIENT_SENT, stage])
        state[GRADIENT_SENT, stage] = free + costs[MESSAGE, stage - 1]
