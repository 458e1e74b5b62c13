"""Who runs and who waits: numbers in order, never more than there is room for, and nothing left behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.runtime.decode.admission import Admission
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.requests import Request

OPTIONS = generate_options(threshold=1.0, max_new_tokens=1)


@settings(max_examples=100, deadline=None)
@given(room=st.integers(1, 3), acts=st.lists(st.integers(-3, 12), max_size=40))
def test_first_come_first_served(room: int, acts: list[int]) -> None:
    """Against two plain lists. Below 0 submits one, 12 lets some join, any other drops that number."""
    admission: Admission[int] = Admission(room)
    waiting: list[int] = []
    running: list[int] = []
    submitted = 0
    for act in acts:
        if act < 0:
            assert admission.submit(Request((submitted,), OPTIONS)) == submitted
            waiting.append(submitted)
            submitted += 1
        elif act == 12:
            admission.admit(lambda number, request, since_s: number * (request.prompt == (number,)))
            while waiting and len(running) < room:
                running.append(waiting.pop(0))
        else:
            assert admission.drop(act) == (act in running)
            running = [number for number in running if number != act]
            waiting = [number for number in waiting if number != act]
        assert list(admission.running.items()) == [(number, number) for number in running]
        assert admission.waiting == len(waiting)
    admission.clear()
    assert (admission.running, admission.waiting) == ({}, 0)
