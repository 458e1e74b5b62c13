"""What a decode process is made of: costs of its ops by number of rows, exits, and stages.

Both the expected latency (``inference``, ``decode_pipeline``) and the event simulation (``decode_events``)
start from the :class:`DecodeProcess` built here. All times are whole nanoseconds. Several sequences at a time
are the matter of ``decode_batch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eeplan.errors import ProfileError
from eeplan.profile import DecodeCosts, OpName, OpProfile
from eeplan.sim.costs import EXIT_OPS, to_ns
from eeplan.sim.layout import Layout
from eeplan.spec import DecodeMode, HeadKind

TOKEN_BYTES = 8
"""A token id on its way back to the first stage."""
SINGLE_ROW_WEIGHT = 1000.0
REMEASURE = "run `eeplan profile` on the run file again"


class ExitPoint(Protocol):
    """One exit of the decoded model: a placed exit, or anything that says as much."""

    @property
    def depth(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def head(self) -> HeadKind: ...


@dataclass(frozen=True, slots=True)
class Exit:
    """The least that decoding needs to know about an exit."""

    depth: int
    """Layers computed before it."""
    head: HeadKind
    stage: int = 0
    """Pipeline stage that checks it."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Nanoseconds of one op by number of rows, never less for more rows."""

    rows: tuple[int, ...]
    ns: tuple[int, ...]

    def at(self, rows: int) -> int:
        """Cost of ``rows`` rows: measured, linear between measured numbers, or along the last line."""
        known = [index for index, number in enumerate(self.rows) if number <= rows]
        left = known[-1] if known else 0
        if self.rows[left] == rows or len(self.rows) == 1:
            return self.ns[left]
        left = min(left, len(self.rows) - 2)
        run, rise = self.rows[left + 1] - self.rows[left], self.ns[left + 1] - self.ns[left]
        return self.ns[left] + round(rise * (rows - self.rows[left]) / run)

    def plus(self, ns: int) -> RowCosts:
        """The same with so much more for any number of rows."""
        return RowCosts(self.rows, tuple(one + ns for one in self.ns))

    def table(self, most: int) -> tuple[int, ...]:
        """Costs of 1 to ``most`` rows."""
        return tuple(self.at(rows) for rows in range(1, most + 1))

    def unmeasured(self, most: int) -> str:
        """Which of 1 to ``most`` rows were not measured, in words; empty when all were."""
        between = [rows for rows in range(1, min(most, self.rows[-1]) + 1) if rows not in self.rows]
        parts = [f"{', '.join(map(str, between))} rows interpolated"] if between else []
        if most > self.rows[-1]:
            parts.append(f"{self.rows[-1] + 1} to {most} rows extrapolated")
        return " and ".join(parts)


def row_costs(points: Iterable[tuple[int, float]]) -> RowCosts:
    """Costs from measured (rows, seconds): the closest ones that do not fall with rows.

    A larger batch need not take longer than a smaller one plus padding, yet it is sometimes measured so, by
    noise or by kernels that are poor at two or three rows. Neighbours that fall are replaced by their mean
    (pool adjacent violators, which is the least-squares fit). A single row, on which most steps run, keeps
    its value: it weighs SINGLE_ROW_WEIGHT times as much.
    """
    pools: list[tuple[float, float, int]] = []
    ordered = sorted(points)
    for rows, seconds in ordered:
        weight, mean, size = (SINGLE_ROW_WEIGHT if rows == 1 else 1.0), seconds, 1
        while pools and pools[-1][1] > mean:
            other_weight, other_mean, other_size = pools.pop()
            mean = (weight * mean + other_weight * other_mean) / (weight + other_weight)
            weight, size = weight + other_weight, size + other_size
        pools.append((weight, mean, size))
    costs = [to_ns(mean) for _, mean, size in pools for _ in range(size)]
    return RowCosts(tuple(rows for rows, _ in ordered), tuple(costs))


@dataclass(frozen=True, slots=True)
class Further:
    """Nanoseconds that each sequence of a step beyond the first adds to an op on the same number of rows: its
    own attention, confidence or token."""

    layer_ns: int = 0
    """Of a sequence with one row, which looks at all keys."""
    masked_layer_ns: int = 0
    """Of one with several rows, which must not look at one another's future."""
    final_head_ns: int = 0
    heads_ns: Mapping[HeadKind, int] = field(default_factory=dict)
    step_ns: int = 0
    """To the step's overhead."""


NOTHING_FURTHER = Further()


@dataclass(frozen=True, slots=True)
class DecodeProcess:
    """A model ready to be decoded: what is computed in which order, and what it costs."""

    exits: tuple[Exit, ...]
    """By depth."""
    layers_per_stage: tuple[int, ...]
    """One entry for decoding on one process."""
    layer: RowCosts
    embedding: RowCosts
    final_head: RowCosts
    heads: Mapping[HeadKind, RowCosts]
    """Exit checks: head, confidence, and what the loop spends on asking. A block attends and so runs on all
    rows, others on the last one."""
    step_overhead_ns: int = 0
    """Once per step and stage."""
    further: Further = NOTHING_FURTHER
    """What more sequences add."""
    message_ns: int = 0
    """Hidden states of one token to the next stage."""
    return_ns: int = 0
    """An emitted token back to the first stage."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model (L)."""
        return sum(self.layers_per_stage)

    @property
    def depths(self) -> tuple[int, ...]:
        """Where tokens are emitted: every exit's depth, then the number of layers."""
        return (*(exit_.depth for exit_ in self.exits), self.num_layers)

    @property
    def full_ns(self) -> int:
        """One token through all layers without any check: a step of mode ``full`` on one process."""
        layers = self.num_layers * self.layer.at(1)
        return self.step_overhead_ns + self.embedding.at(1) + layers + self.final_head.at(1)


def decode_process(
    profile: OpProfile, layout: Layout, exits: Sequence[ExitPoint], mode: DecodeMode
) -> DecodeProcess:
    """Look up what decoding in ``mode`` needs.

    Mode ``pipeline`` runs one process per stage of ``layout``; the others hold the whole model in one.

    Args:
        exits: in any order.

    Raises:
        ProfileError: the profile has no decode costs, or lacks an op.
    """
    stages = layout.layers_per_stage if mode == "pipeline" else (layout.num_layers,)
    costs = costs_for(profile, len(stages))
    kinds = {exit_.head for exit_ in exits}
    width = 4 if profile.shape.precision == "fp32" else 2
    asking_ns = to_ns(costs.check_overhead_s)
    return DecodeProcess(
        exits=tuple(
            Exit(exit_.depth, exit_.head, exit_.stage if mode == "pipeline" else 0)
            for exit_ in sorted(exits, key=lambda exit_: exit_.depth)
        ),
        layers_per_stage=stages,
        layer=_row_costs_of(costs, "layer"),
        embedding=_row_costs_of(costs, "embedding"),
        final_head=_row_costs_of(costs, "final_head"),
        heads={kind: _row_costs_of(costs, EXIT_OPS[kind]).plus(asking_ns) for kind in sorted(kinds)},
        step_overhead_ns=to_ns(costs.step_overhead_s),
        further=Further(
            layer_ns=_further_ns(costs, "layer"),
            masked_layer_ns=_further_ns(costs, "layer", rows_each=2),
            final_head_ns=_further_ns(costs, "final_head"),
            heads_ns={kind: _further_ns(costs, EXIT_OPS[kind]) + asking_ns for kind in sorted(kinds)},
            step_ns=to_ns(costs.sequence_overhead_s),
        ),
        message_ns=to_ns(profile.p2p.seconds(profile.shape.hidden_size * width)),
        return_ns=to_ns(profile.p2p.seconds(TOKEN_BYTES)),
    )


def costs_for(profile: OpProfile, processes: int) -> DecodeCosts:
    """Decode costs measured with as many processes at once, or else with the nearest number.

    Raises:
        ProfileError: decoding was not measured.
    """
    if not profile.decode:
        raise ProfileError(f"profile has no decode costs, so decoding cannot be predicted; {REMEASURE}")
    return min(profile.decode, key=lambda costs: (abs(costs.processes - processes), costs.processes))


def _row_costs_of(costs: DecodeCosts, op: OpName) -> RowCosts:
    points = [(cost.rows, cost.time.mean_s) for cost in costs.ops if cost.op == op and cost.sequences == 1]
    if not any(rows == 1 for rows, _ in points):
        raise ProfileError(f"profile has no decode cost of '{op}' for a single row; {REMEASURE}")
    return row_costs(points)


def _further_ns(costs: DecodeCosts, op: OpName, rows_each: int = 1) -> int:
    """From rows of several sequences beside as many rows of one; 0 where that was not measured."""
    of_one = _row_costs_of(costs, op)
    found = [
        max(0, to_ns(cost.time.mean_s) - of_one.at(cost.rows)) / (cost.sequences - 1)
        for cost in costs.ops
        if cost.op == op and cost.sequences > 1 and cost.rows == rows_each * cost.sequences
    ]
    return round(sum(found) / len(found)) if found else 0
