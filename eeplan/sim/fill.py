"""Bubble filling: partial microbatches in the idle time of a 1F1B schedule (EE-LLM 3.3, C.2).

1F1B leaves two explicit bubbles. Region A lies between a stage's last forward of the warm-up and its first
backward: warm-up inserts go forward through the first stages, turn at the early losses met there, and come
back. Region B is the cool-down: truncated microbatches go forward through all stages and back through the
last ones only. For P=4, six full microbatches, f=1, b=2, exits on every stage and two inserts per region
(``<``: backward), time to the right; 6 and 7 are truncated after 2 and 1 stages, 8 and 9 are the warm-up
inserts:

    stage 0 |012389<9<8<04<15<26<37<4.<5|
    stage 1 |.012.8<8<03<14<25<36<47<5..|
    stage 2 |..01..<02<13<24<35<46<57<6.|
    stage 3 |...0<01<12<23<34<45<56<67<7|

The passes: 1F1B of the full and the truncated microbatches without the backwards that are cut off, with
messages; the inserts of region A as a schedule of their own, with messages; then the second is spliced into
the first, on every stage between its last forward before the first backward and what follows. The hidden
states of that last forward are sent after the inserts when the next stage needs them only after its own first
backward, so both ends of each channel see the same order. What comes before the splice, the inserts, and what
comes after exchange no messages with each other, so the whole is free of deadlock if each of the three is.

Microbatches are numbered full first, then truncated, then warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eeplan.errors import ScheduleError
from eeplan.plan import Plan
from eeplan.sim.schedule import (
    Instruction,
    Kind,
    Op,
    Schedule,
    compute_order,
    full,
    one_f_one_b,
    truncated,
    warm_up,
    with_messages,
)


@dataclass(frozen=True, slots=True)
class Fill:
    """Which microbatches an iteration has. Without inserts it is plain 1F1B.

    In mode ``added`` the full microbatches are the run's M and the others come on top; in mode ``same_count``
    they are what is left of M.
    """

    num_full: int
    depths: tuple[int, ...] = ()
    """Stages that each warm-up insert passes, deepest first: the last one turns first."""
    reaches: tuple[int, ...] = ()
    """Stages that the backward of each truncated microbatch passes, furthest first."""

    @classmethod
    def of(cls, schedule: Schedule) -> Fill:
        """Read back from a schedule's kinds."""
        if not schedule.kinds:
            return cls(schedule.num_microbatches)
        depths = (kind.last_forward + 1 for kind in schedule.kinds if kind.name == "warm_up")
        cuts = (kind.first_backward for kind in schedule.kinds if kind.name == "truncated")
        return cls(
            num_full=sum(kind.name == "full" for kind in schedule.kinds),
            depths=tuple(sorted(depths, reverse=True)),
            reaches=tuple(schedule.num_stages - cut for cut in sorted(cuts)),
        )

    @property
    def num_microbatches(self) -> int:
        """All of them."""
        return self.num_full + len(self.reaches) + len(self.depths)

    @property
    def is_plain(self) -> bool:
        """No bubble is filled."""
        return not self.depths and not self.reaches

    def warm_up_on(self, stage: int) -> int:
        """Warm-up inserts that ``stage`` hosts."""
        return sum(depth > stage for depth in self.depths)

    def turning_on(self, stage: int) -> int:
        """Warm-up inserts whose last stage is ``stage``."""
        return sum(depth == stage + 1 for depth in self.depths)

    def truncated_on(self, stage: int, num_stages: int) -> int:
        """Truncated microbatches whose backward passes ``stage``."""
        return sum(reach >= num_stages - stage for reach in self.reaches)

    def kinds(self, num_stages: int) -> tuple[Kind, ...]:
        """Kind of every microbatch, by number."""
        return (
            *([full(num_stages)] * self.num_full),
            *(truncated(num_stages, reach) for reach in self.reaches),
            *(warm_up(depth) for depth in self.depths),
        )

    def held_at_first_backward(self, stage: int, num_stages: int) -> int:
        """Full and truncated microbatches that ``stage`` keeps activations of when its first backward runs.

        1F1B runs min(P-i, all) of them forward by then, the full ones first.
        """
        return min(num_stages - stage, self.num_full + self.truncated_on(stage, num_stages))

    def most_in_flight(self, stage: int, num_stages: int) -> int:
        """Most microbatches of ``stage`` between forward and backward at once, in closed form.

        With M >= P that is P - i and the warm-up inserts it hosts. A forward that keeps nothing counts while
        it runs, which shows only where fewer full microbatches than stages leave room in the warm-up.
        """
        held = self.held_at_first_backward(stage, num_stages)
        unkept = min(num_stages - stage, self.num_full + len(self.reaches)) > held
        return max(held + self.warm_up_on(stage), held + unkept)


def warm_up_depths(count: int, has_exit: Sequence[bool]) -> tuple[int, ...]:
    """Depths of region A's inserts: insert k of K goes K+1-k stages deep (EE-LLM C.2).

    It turns already at its last exit, since nothing deeper gives it a loss; one that meets no exit gives no
    gradient and is dropped.

    Args:
        count: K, at most the number of stages.
        has_exit: for each stage, whether an early exit is on it.
    """
    last_exit = [0]
    for stage, here in enumerate(has_exit):
        last_exit.append(stage + 1 if here else last_exit[-1])
    return tuple(last_exit[depth] for depth in range(count, 0, -1) if last_exit[depth])


def truncated_reaches(count: int, num_stages: int, forward_ns: int, backward_ns: int) -> tuple[int, ...]:
    """Reaches of region B for equal stages: insert k goes back floor(P - k (f/b + 1)) stages (EE-LLM C.2).

    In integers, and at least one stage: more than the bubble's capacity makes the iteration longer.
    """
    work = forward_ns + backward_ns
    return tuple(max(1, (num_stages * backward_ns - k * work) // backward_ns) for k in range(1, count + 1))


def filled(num_stages: int, fill: Fill) -> Schedule:
    """The 1F1B schedule of ``fill.num_full`` microbatches with its inserts, messages included.

    Raises:
        ScheduleError: no full microbatch; an insert of no or all stages; a wrong order of inserts.
    """
    if fill.is_plain:
        return one_f_one_b(num_stages, fill.num_full)
    _require_order("warm-up", fill.depths, num_stages)
    _require_order("truncated", fill.reaches, num_stages)
    if fill.num_full < 1:
        raise ScheduleError(f"{fill.num_full} full microbatches beside the inserts; give at least 1")
    through = fill.num_full + len(fill.reaches)
    order = compute_order(num_stages, through)
    base = Schedule(fill.num_microbatches, order.stages, fill.kinds(num_stages))
    base = with_messages(_without_cut_backwards(base))
    inserts = with_messages(_insert_order(base, through))
    stages = []
    for stage, (program, inserted) in enumerate(zip(base.stages, inserts.stages, strict=True)):
        at = _splice_position(program, stage, num_stages, through)
        stages.append((*program[:at], *inserted, *program[at:]))
    return replace(base, stages=tuple(stages))


def _require_order(name: str, lengths: tuple[int, ...], num_stages: int) -> None:
    if any(not 1 <= length < num_stages for length in lengths):
        raise ScheduleError(
            f"{name} inserts of {', '.join(map(str, lengths))} stages; expected 1 to {num_stages - 1} of "
            f"{num_stages} stages each"
        )
    if list(lengths) != sorted(lengths, reverse=True):
        listed = ", ".join(map(str, lengths))
        raise ScheduleError(f"{name} inserts of {listed} stages; expected the longest first")


def _without_cut_backwards(schedule: Schedule) -> Schedule:
    stages = []
    for stage, program in enumerate(schedule.stages):
        has_backward = schedule.having(Op.BACKWARD, stage)
        stages.append(tuple(i for i in program if i.op is Op.FORWARD or has_backward[i.microbatch]))
    return replace(schedule, stages=tuple(stages))


def _insert_order(schedule: Schedule, first: int) -> Schedule:
    """Region A alone: all forwards of a stage, deepest insert first, then their backwards in reverse."""
    inserts = range(first, schedule.num_microbatches)
    stages = []
    for stage in range(schedule.num_stages):
        hosted = [m for m in inserts if schedule.kind(m).has(Op.FORWARD, stage)]
        forwards = (Instruction(Op.FORWARD, m) for m in hosted)
        stages.append((*forwards, *(Instruction(Op.BACKWARD, m) for m in reversed(hosted))))
    return replace(schedule, stages=tuple(stages))


def _splice_position(program: Sequence[Instruction], stage: int, num_stages: int, through: int) -> int:
    """Where the inserts of a stage go: behind its last forward before its first backward.

    Its send goes before them only if the next stage runs that forward before its own first backward as well,
    as happens with fewer microbatches than stages.
    """
    last, next_stages_last = (min(num_stages - s, through) - 1 for s in (stage, stage + 1))
    at = program.index(Instruction(Op.FORWARD, last)) + 1
    sent_before = stage + 1 < num_stages and next_stages_last >= last
    return at + sent_before


def fill_of(plan: Plan) -> Fill:
    """The microbatches of one iteration of ``plan`` on one data-parallel rank."""
    if plan.fill is None:
        return Fill(plan.num_microbatches)
    return Fill(plan.fill.num_full, plan.fill.warm_up_depths, plan.fill.truncated_reaches)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that simulating, training and reporting a plan all use.

    Raises:
        ScheduleError: the plan's fill is impossible.
    """
    return filled(len(plan.stages), fill_of(plan))
