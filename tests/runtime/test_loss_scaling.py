"""The loss scale of fp16: constant or moving, in checkpoints and in the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_run
from parallel_cases import Case, run_here, write_seeds
from parallel_worker import Outcome

from eeplan.errors import SchemaError
from eeplan.runtime.recording import _scale_text

HALF = Case(exits="1", precision="fp16", sequences=4)


def outcome_of(case: Case, folder: Path, steps: int, **training: float) -> Outcome:
    (outcome,) = run_here([case.work(steps, write_seeds(folder, [case]), **training)])
    return outcome


def test_a_constant_scale_stays_whatever_overflows(tmp_path: Path) -> None:
    case = Case(exits="1", precision="fp16", sequences=4, loss_scale=128.0, overflow=(0, 2))
    outcome = outcome_of(case, tmp_path, 3)
    assert outcome.loss_scales == [128.0] * 3
    assert outcome.skipped == [False, True, False]


def test_a_moving_scale_grows_when_nothing_overflows(tmp_path: Path) -> None:
    outcome = outcome_of(HALF, tmp_path, 5, loss_scale_window=2)
    assert outcome.loss_scales == [4096.0, 4096.0, 8192.0, 8192.0, 16384.0]


def test_hysteresis_and_the_least_scale(tmp_path: Path) -> None:
    """Out of the range of fp16 from the start: one overflow is let pass, then it halves down to the least."""
    outcome = outcome_of(HALF, tmp_path, 5, initial_loss_scale=2.0**40, min_loss_scale=2.0**38, hysteresis=2)
    assert outcome.loss_scales == [2.0**40, 2.0**40, 2.0**39, 2.0**38, 2.0**38]
    assert outcome.skipped == [True] * 5


def test_a_scale_that_could_only_rise_is_refused() -> None:
    with pytest.raises(SchemaError, match="min_loss_scale 8 exceeds initial_loss_scale 4"):
        make_run(training__initial_loss_scale=4.0, training__min_loss_scale=8.0)


def test_the_log_tells_of_skipped_steps() -> None:
    assert _scale_text({}) == ""
    assert _scale_text({"loss_scale": 4096.0, "skipped": False}) == "loss scale: 4096.0 | "
    skipped = _scale_text({"loss_scale": 4096.0, "skipped": True})
    assert skipped == "loss scale: 4096.0 | step skipped: gradients overflowed | "
