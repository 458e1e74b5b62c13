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
class Schedule:
    """An ordered tuple of instructions for each stage.

    Messages go to the neighbour: SEND_FORWARD and RECV_BACKWARD to and from ``stage + 1``, RECV_FORWARD and
    SEND_BACKWARD from and to ``stage - 1``.
    """

    num_microbatches: int
    stages: tuple[tuple[Instruction, ...], ...]

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.stages)
