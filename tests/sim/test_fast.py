from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import ScheduleError
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.fast import stage_ends_ns
from eeplan.sim.schedule import Schedule, compute_order, one_f_one_b

durations = st.one_of(st.integers(0, 5), st.integers(0, 10_000))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.integers(1, 14), st.data())
def test_every_stage_ends_when_the_engine_says(
    num_stages: int, num_microbatches: int, data: st.DataObject
) -> None:
    def draw(length: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(durations, min_size=length, max_size=length)))

    rows = [(draw(num_stages), draw(num_stages)) for _ in range(2)]
    messages = draw(num_stages - 1)
    ends = stage_ends_ns(
        compute_order(num_stages, num_microbatches),
        np.array([forward for forward, _ in rows]),
        np.array([backward for _, backward in rows]),
        messages,
    )
    for (forward, backward), row in zip(rows, ends.tolist(), strict=True):
        # One byte a nanosecond, so that message sizes are the message times.
        costs = PipelineCosts(forward, backward, bytes_per_s=1e9, output_bytes=(*messages, 0))
        timeline = simulate(one_f_one_b(num_stages, num_microbatches), costs)
        assert row == [spans[-1].end_ns for spans in timeline.spans]


def test_a_schedule_that_cannot_run_is_named() -> None:
    first, last = compute_order(2, 1).stages
    stuck = Schedule(1, (tuple(reversed(first)), last))
    with pytest.raises(ScheduleError, match="wait for each other"):
        stage_ends_ns(stuck, np.ones((1, 2), np.int64), np.ones((1, 2), np.int64), (0,))
