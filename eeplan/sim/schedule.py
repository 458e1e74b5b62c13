"""Schedules as data: what each stage does, in order. Both the simulator and the executor interpret them.

Passes build a schedule from frozen data: compute order, then messages. For P=4, M=6 the compute order is

    stage 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    stage 1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    stage 2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
    stage 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

Costs and times are not known here, and neither is where exits are: an exit's forward belongs to the FORWARD
or the BACKWARD of its stage by the plan's ``exit_forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from eeplan.errors import ScheduleError

KindName = Literal["full", "warm_up", "truncated"]


class Op(Enum):
    """What one instruction does."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "sf"
    RECV_FORWARD = "rf"
    SEND_BACKWARD = "sb"
    RECV_BACKWARD = "rb"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one stage for one microbatch."""

    op: Op
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Kind:
    """Which part of the pipeline a microbatch passes (EE-LLM 3.3).

    ``full``: all of it. ``warm_up``: forward on the first stages only, then back from the early losses met
    there. ``truncated``: forward everywhere, backward through the last stages only.
    """

    name: KindName
    last_forward: int
    """Stage where the forward ends and the backward begins."""
    first_backward: int
    """Stage where the backward ends; stages before it keep no activations."""

    def has(self, op: Op, stage: int) -> bool:
        """Whether ``stage`` has this instruction for such a microbatch."""
        first, last = self.first_backward, self.last_forward
        match op:
            case Op.FORWARD:
                return stage <= last
            case Op.SEND_FORWARD:
                return stage < last
            case Op.RECV_FORWARD:
                return 0 < stage <= last
            case Op.BACKWARD:
                return first <= stage <= last
            case Op.SEND_BACKWARD:
                return first < stage <= last
            case Op.RECV_BACKWARD:
                return first <= stage < last

    def turns_on(self, stage: int) -> bool:
        """Whether a warm-up insert ends on ``stage``: it runs no further than that stage's last exit."""
        return self.name == "warm_up" and stage == self.last_forward


def full(num_stages: int) -> Kind:
    """The kind of every microbatch of plain 1F1B."""
    return Kind("full", last_forward=num_stages - 1, first_backward=0)


def warm_up(depth: int) -> Kind:
    """Forward and backward on the first ``depth`` stages."""
    return Kind("warm_up", last_forward=depth - 1, first_backward=0)


def truncated(num_stages: int, reach: int) -> Kind:
    """Forward on all stages, backward on the last ``reach``."""
    return Kind("truncated", last_forward=num_stages - 1, first_backward=num_stages - reach)


@dataclass(frozen=True, slots=True)
class Schedule:
    """An ordered tuple of instructions for each stage.

    Messages go to the neighbour: SEND_FORWARD and RECV_BACKWARD to and from ``stage + 1``, RECV_FORWARD and
    SEND_BACKWARD from and to ``stage - 1``.
    """

    num_microbatches: int
    stages: tuple[tuple[Instruction, ...], ...]
    kinds: tuple[Kind, ...] = ()
    """Of each microbatch; empty when all of them are full."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.stages)

    def kind(self, microbatch: int) -> Kind:
        """Which part of the pipeline ``microbatch`` passes."""
        return self.kinds[microbatch] if self.kinds else full(self.num_stages)

    def having(self, op: Op, stage: int) -> list[bool]:
        """For each microbatch, whether ``stage`` has this instruction for it."""
        if not self.kinds:
            return [full(self.num_stages).has(op, stage)] * self.num_microbatches
        known = {kind: kind.has(op, stage) for kind in set(self.kinds)}
        return [known[kind] for kind in self.kinds]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """The 1F1B schedule with its messages, for any number of stages and microbatches.

    Raises:
        ScheduleError: fewer than one stage or microbatch.
    """
    return with_messages(compute_order(num_stages, num_microbatches))


def compute_order(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B without messages: stage i (from 0) warms up with min(P-1-i, M) forwards, then alternates one
    forward and one backward, then drains the backwards that are left.

    Raises:
        ScheduleError: fewer than one stage or microbatch.
    """
    for name, value in (("stages", num_stages), ("microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"a schedule of {value} {name} was asked for; give at least 1")
    # An instruction is immutable, so all stages share one object for each microbatch.
    forward = [Instruction(Op.FORWARD, m) for m in range(num_microbatches)]
    backward = [Instruction(Op.BACKWARD, m) for m in range(num_microbatches)]
    stages = []
    for stage in range(num_stages):
        warm_up = min(num_stages - 1 - stage, num_microbatches)
        steady = num_microbatches - warm_up
        order = forward[:warm_up]
        for m in range(steady):
            order += (forward[warm_up + m], backward[m])
        stages.append((*order, *backward[steady:]))
    return Schedule(num_microbatches, tuple(stages))


def with_messages(schedule: Schedule) -> Schedule:
    """Insert the sends and receives that a compute order needs.

    Between two ops of a stage lie the first one's send and the second one's receive. If the two are of
    different directions, the forward message comes first, as in Megatron's ``send_forward_recv_backward`` and
    ``send_backward_recv_forward``. So both ends of a link agree, and no cycle of waits can form even if each
    send blocks until its receive is posted:

        F0 (sf0 rb0) B0     a forward, then a backward: send the hidden states, then await the gradient
        B0 (rf1 sb0) F1     a backward, then a forward: receive the hidden states, then send the gradient

    A microbatch that is not full has only the messages of its kind.
    """
    messages = {op: [Instruction(op, m) for m in range(schedule.num_microbatches)] for op in Op}
    stages = []
    for stage, order in enumerate(schedule.stages):
        having = {op: schedule.having(op, stage) for op in Op}
        program: list[Instruction] = []
        pending: Instruction | None = None
        for compute in order:
            m, forward = compute.microbatch, compute.op is Op.FORWARD
            receive = Op.RECV_FORWARD if forward else Op.RECV_BACKWARD
            send = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
            exchange = [messages[receive][m]] if having[receive][m] else []
            if pending is not None:
                gradient_waits = pending.op is Op.SEND_BACKWARD and forward
                exchange.insert(len(exchange) if gradient_waits else 0, pending)
            program += (*exchange, compute)
            pending = messages[send][m] if having[send][m] else None
        stages.append(tuple(program) if pending is None else (*program, pending))
    return Schedule(schedule.num_microbatches, tuple(stages), schedule.kinds)
