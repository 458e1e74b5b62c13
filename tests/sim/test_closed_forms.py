from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.bounds import closed_form_ns
from eeplan.sim.closed_forms import asynchronous_ns, rendezvous_ns
from eeplan.sim.fast import Transport, makespans_ns

GOLDEN_MS = {(4, 64): 203.56, (8, 128): 410.20, (64, 1024): 3303.16}
"""Rendezvous makespans at f=1, b=2, c=0.01 ms (facts 8)."""

Form = Callable[[Sequence[int], Sequence[int], Sequence[int], int], int]
FORMS: dict[Transport, Form] = {"asynchronous": asynchronous_ns, "rendezvous": rendezvous_ns}


def stages(seed: int) -> tuple[list[int], list[int], list[int], int]:
    """Forwards, backwards, messages and microbatches: equal or heavy-tailed stages, equal or odd links."""
    generator = np.random.default_rng(seed)
    num_stages = int(generator.integers(1, 9))
    spread = int(generator.choice([1, 4, 1000]))
    base = int(generator.choice([0, spread, 20 * spread]))
    forward = generator.integers(0, spread, num_stages) + base
    backward = generator.integers(0, spread, num_stages) + 2 * base
    message = generator.integers(0, max(1, spread // int(generator.choice([1, 8]))), num_stages - 1)
    num_microbatches = num_stages + int(generator.integers(1, 30))
    return forward.tolist(), backward.tolist(), message.tolist(), num_microbatches


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(FORMS)), st.booleans())
def test_the_form_is_the_recurrence_unless_messages_are_longer_than_ops(
    seed: int, transport: Transport, queue: bool
) -> None:
    forward, backward, message, num_microbatches = stages(seed)
    if not queue:
        longest = max(message, default=0)
        forward, backward = ([op + longest for op in ops] for ops in (forward, backward))
    times = np.array([forward]), np.array([backward])
    found = makespans_ns(*times, num_microbatches, message, transport)[0]
    form = FORMS[transport](forward, backward, message, num_microbatches)
    assert form <= found if queue else form == found


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_both_are_the_known_form_when_messages_are_free(seed: int) -> None:
    forward, backward, message, num_microbatches = stages(seed)
    free = [0] * len(message)
    known = closed_form_ns(forward, backward, num_microbatches)
    for form in FORMS.values():
        assert form(forward, backward, free, num_microbatches) == known


@pytest.mark.parametrize(("num_stages", "num_microbatches"), list(GOLDEN_MS))
def test_golden_rendezvous_makespans(num_stages: int, num_microbatches: int) -> None:
    forward, backward = [1_000_000] * num_stages, [2_000_000] * num_stages
    found = rendezvous_ns(forward, backward, [10_000] * (num_stages - 1), num_microbatches)
    assert found == round(GOLDEN_MS[num_stages, num_microbatches] * 1e6)


def test_a_path_that_stays_on_one_stage_is_not_the_longest() -> None:
    """Negative control: equal stages, where rounds wander over all of them to pay for messages."""
    forward, backward, message = [10] * 4, [20] * 4, [1] * 3
    # Four stages in four rounds cost 4 x 30 + 2 x 3 instead of 4 x 30.
    staying = 2 * (4 * 30 + 2 * 3) + (40 - 5) * 30
    assert asynchronous_ns(forward, backward, message, 40) > staying
    assert makespans_ns(np.array([forward]), np.array([backward]), 40, message)[0] > staying


@pytest.mark.parametrize("form", FORMS.values())
def test_too_few_microbatches_are_refused(form: Form) -> None:
    with pytest.raises(ValueError, match="more microbatches than stages, got 3 for 3"):
        form([1] * 3, [1] * 3, [0] * 2, 3)
