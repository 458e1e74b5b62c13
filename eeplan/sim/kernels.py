# mypy: disable-error-code="untyped-decorator"
"""Compiled loops behind ``fast``: makespans of 1F1B for many candidates, about a nanosecond per op.

Importing this module costs the import of numba (0.3 s), so ``fast`` imports it on the first call. Machine
code is kept on disk (``cache=True``); only the very first call on a machine compiles.

The recurrences run LANES candidates side by side. All their state is one array, state[stage, field, lane]:
with a single base address the compiler can see that the fields do not overlap and turns each loop over lanes
into vector instructions.

1F1B has an order in which every op comes after those it waits for. Stage i has w = P-1-i warm-up forwards.
Warm-up forward m runs on stages 0, 1, ..., P-2-m in turn; then round k, for k = 0..M-1, runs forward w+k (if
there is one) and backward k on stages P-1, ..., 0 in turn. The forward of round k takes the message that
stage i-1 sent in round k-1, or last in its warm-up, so one message per link and direction is all to keep.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Nanoseconds = NDArray[np.int64]

LANES = 32
"""Loops of 24 or fewer are unrolled by the compiler before it can vectorise them, and are 5 times slower."""

CLOCK, FORWARD, BACKWARD, MESSAGE, HIDDEN_SENT, GRADIENT_SENT = range(6)
"""Fields of a stage: its clock; what a forward, a backward and a message to the next stage take; when its
last message to the next and to the previous stage arrives, which is also when that link is free again."""
FIELDS = 6


@njit(cache=True)
def closed_form(
    forward_ns: Nanoseconds, backward_ns: Nanoseconds, num_microbatches: int, makespan_ns: Nanoseconds
) -> None:
    """``bounds.closed_form_ns`` for each row of [n, P] times, into makespan_ns [n]."""
    num_candidates, num_stages = forward_ns.shape
    # Over stages 0..j: the sum of all work, and with the ramp that the slowest op so far still has ahead.
    through = np.empty(num_stages, np.int64)
    forward_ramp = np.empty(num_stages, np.int64)
    backward_ramp = np.empty(num_stages, np.int64)
    for row in range(num_candidates):
        work = slowest_forward = slowest_backward = 0
        for stage in range(num_stages):
            below = num_stages - 1 - stage
            work += forward_ns[row, stage] + backward_ns[row, stage]
            slowest_forward = max(slowest_forward, forward_ns[row, stage])
            slowest_backward = max(slowest_backward, backward_ns[row, stage])
            through[stage] = work
            forward_ramp[stage] = work + below * slowest_forward
            backward_ramp[stage] = work + below * slowest_backward
        up = down = best = 0
        for stage in range(num_stages - 1, -1, -1):
            here = forward_ns[row, stage] + backward_ns[row, stage]
            up = max(up, forward_ramp[stage])
            down = max(down, backward_ramp[stage])
            rounds = num_microbatches - 1 - (num_stages - 1 - stage)
            best = max(best, up + down - through[stage] + rounds * here)
        makespan_ns[row] = best


@njit(cache=True)
def asynchronous(
    forward_ns: Nanoseconds,
    backward_ns: Nanoseconds,
    message_ns: Nanoseconds,
    num_microbatches: int,
    ends_ns: Nanoseconds,
) -> None:
    """Asynchronous messages: when each stage ends its last op, into ends_ns [n, P].

    Times are [n, P], [n, P] and [n, P-1].
    """
    num_candidates, num_stages = forward_ns.shape
    state = np.zeros((num_stages, FIELDS, LANES), np.int64)
    for start in range(0, num_candidates, LANES):
        _load(state, forward_ns, backward_ns, message_ns, start)
        for microbatch in range(min(num_stages - 1, num_microbatches)):
            for stage in range(num_stages - 1 - microbatch):
                _forward(state, stage)
        for microbatch in range(num_microbatches):
            for stage in range(num_stages - 1, -1, -1):
                if num_stages - 1 - stage + microbatch < num_microbatches:
                    _forward(state, stage)
                _backward(state, stage)
        _store(state, start, ends_ns)


@njit(cache=True)
def rendezvous(
    forward_ns: Nanoseconds,
    backward_ns: Nanoseconds,
    message_ns: Nanoseconds,
    num_microbatches: int,
    ends_ns: Nanoseconds,
) -> None:
    """Rendezvous messages in the order of ``with_messages``; arguments as for ``asynchronous``.

    After the forward of round k, stage i exchanges with stage i+1: hidden states down, then the gradient up.
    For stage i+1 these are its last two steps of round k, so both stages leave the exchange together.
    """
    num_candidates, num_stages = forward_ns.shape
    state = np.zeros((num_stages, FIELDS, LANES), np.int64)
    for start in range(0, num_candidates, LANES):
        _load(state, forward_ns, backward_ns, message_ns, start)
        for microbatch in range(min(num_stages - 1, num_microbatches)):
            for stage in range(num_stages - 1 - microbatch):
                _compute(state, stage, FORWARD)
                _exchange(state, stage, 1)
        for microbatch in range(num_microbatches):
            for stage in range(num_stages - 1, -1, -1):
                has_forward = num_stages - 1 - stage + microbatch < num_microbatches
                if has_forward:
                    _compute(state, stage, FORWARD)
                if stage < num_stages - 1:
                    _exchange(state, stage, 2 if has_forward else 1)
                _compute(state, stage, BACKWARD)
        _store(state, start, ends_ns)


@njit(inline="always")
def _load(
    state: Nanoseconds,
    forward_ns: Nanoseconds,
    backward_ns: Nanoseconds,
    message_ns: Nanoseconds,
    start: int,
) -> None:
    num_candidates, num_stages = forward_ns.shape
    for stage in range(num_stages):
        for lane in range(LANES):
            # The last block repeats its last candidate in the lanes that are left over.
            row = min(start + lane, num_candidates - 1)
            state[stage, CLOCK, lane] = 0
            state[stage, FORWARD, lane] = forward_ns[row, stage]
            state[stage, BACKWARD, lane] = backward_ns[row, stage]
            state[stage, MESSAGE, lane] = message_ns[row, stage] if stage < num_stages - 1 else 0
            state[stage, HIDDEN_SENT, lane] = 0
            state[stage, GRADIENT_SENT, lane] = 0


@njit(inline="always")
def _store(state: Nanoseconds, start: int, ends_ns: Nanoseconds) -> None:
    for stage in range(state.shape[0]):
        for lane in range(min(LANES, ends_ns.shape[0] - start)):
            ends_ns[start + lane, stage] = state[stage, CLOCK, lane]


@njit(inline="always")
def _forward(state: Nanoseconds, stage: int) -> None:
    for lane in range(LANES):
        time = state[stage, CLOCK, lane]
        if stage > 0:
            time = max(time, state[stage - 1, HIDDEN_SENT, lane])
        time += state[stage, FORWARD, lane]
        state[stage, CLOCK, lane] = time
        free = max(time, state[stage, HIDDEN_SENT, lane])
        state[stage, HIDDEN_SENT, lane] = free + state[stage, MESSAGE, lane]


@njit(inline="always")
def _backward(state: Nanoseconds, stage: int) -> None:
    for lane in range(LANES):
        time = state[stage, CLOCK, lane]
        if stage < state.shape[0] - 1:
            time = max(time, state[stage + 1, GRADIENT_SENT, lane])
        time += state[stage, BACKWARD, lane]
        state[stage, CLOCK, lane] = time
        if stage > 0:
            free = max(time, state[stage, GRADIENT_SENT, lane])
            state[stage, GRADIENT_SENT, lane] = free + state[stage - 1, MESSAGE, lane]


@njit(inline="always")
def _compute(state: Nanoseconds, stage: int, field: int) -> None:
    for lane in range(LANES):
        state[stage, CLOCK, lane] += state[stage, field, lane]


@njit(inline="always")
def _exchange(state: Nanoseconds, stage: int, num_messages: int) -> None:
    """``num_messages`` in a row between ``stage`` and the next, which both wait for each other first."""
    for lane in range(LANES):
        time = max(state[stage, CLOCK, lane], state[stage + 1, CLOCK, lane])
        time += num_messages * state[stage, MESSAGE, lane]
        state[stage, CLOCK, lane] = time
        state[stage + 1, CLOCK, lane] = time
