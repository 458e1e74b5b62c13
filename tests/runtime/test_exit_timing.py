"""Exits are told apart inside one backward call, by a clock that only the ops themselves move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eeplan.runtime.clock import Clock
from eeplan.runtime.exit_timing import ExitTimer, mean_seconds, median_seconds

SECOND_NS = 1_000_000_000


class ManualClock(Clock):
    """Time passes when an op says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now_ns = 0

    def mark(self) -> int:
        return self.now_ns


class Work(torch.autograd.Function):
    """Takes some seconds forward, and some backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: ManualClock, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now_ns += round(forward_s * SECOND_NS)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.clock.now_ns += round(ctx.backward_s * SECOND_NS)
        return gradient * 2.0, None, None, None


def one_microbatch(
    clock: ManualClock, timer: ExitTimer | None, received: Tensor, *, eager: bool = False, longer: float = 0.0
) -> Tensor:
    """A last stage with two exits between its layers, as ``stage.StageComputation`` runs it."""
    shallow = Work.apply(received, clock, 10.0, 20.0)
    deep = Work.apply(shallow, clock, 10.0, 20.0)
    final = Work.apply(deep, clock, 5.0, 7.0).sum()
    losses = [final]
    if not eager:
        clock.now_ns += 1000 * SECOND_NS  # other microbatches
    for name, hidden, forward_s, backward_s in (
        ("shallow", shallow, 1.0, 3.0),
        ("deep", deep, 2.0, 5.0 + longer),
    ):
        if timer is None:
            losses.append(Work.apply(hidden, clock, forward_s, backward_s).sum())
            continue
        with timer.forward(name):
            losses.append(Work.apply(timer.watched(name, hidden), clock, forward_s, backward_s).sum())
    if timer is not None:
        timer.begin_backward()
    torch.autograd.backward([sum(losses[1:], losses[0])], [torch.ones(())])
    assert received.grad is not None
    return received.grad


@pytest.mark.parametrize("eager", [False, True])
def test_each_exit_gets_its_own_time(eager: bool) -> None:
    clock = ManualClock()
    timer = ExitTimer(clock)
    for longer in (0.0, 2.0):
        one_microbatch(clock, timer, torch.ones(3, requires_grad=True), eager=eager, longer=longer)
    found = mean_seconds(clock, timer.take())
    assert found == {
        "shallow": {"forward": pytest.approx(1.0), "backward": pytest.approx(3.0)},
        "deep": {"forward": pytest.approx(2.0), "backward": pytest.approx(6.0)},
    }
    assert timer.take() == []


def test_being_timed_changes_no_gradient() -> None:
    received = [torch.rand(5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    received[1] = received[0].detach().clone().requires_grad_()
    clock = ManualClock()
    plain = one_microbatch(clock, None, received[0])
    assert torch.equal(one_microbatch(clock, ExitTimer(clock), received[1]), plain)


def test_an_input_without_gradient_is_left_alone() -> None:
    hidden = torch.ones(2)
    assert ExitTimer(ManualClock()).watched("exit_1", hidden) is hidden


def test_medians_over_iterations() -> None:
    seen = [{"exit_1": {"forward": value, "backward": 2 * value}} for value in (1.0, 9.0, 2.0)]
    assert median_seconds(seen) == {"exit_1": {"forward": 2.0, "backward": 4.0}}  # type: ignore[arg-type]
    assert median_seconds([]) == {}
