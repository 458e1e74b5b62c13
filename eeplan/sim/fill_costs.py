"""What partial microbatches cost a stage: where a warm-up insert turns, and where nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eeplan.sim.costs import EXIT_OPS, CostModel, PipelineCosts, to_ns
from eeplan.sim.parameters import Head
from eeplan.spec import ExitForward


@dataclass(frozen=True, slots=True)
class PartialCosts:
    """Of one stage and microbatch; see the fields of the same names of ``PipelineCosts``."""

    turn_forward_ns: int
    turn_backward_ns: int
    turn_kept_bytes: int
    bare_forward_ns: int


def partial_costs(
    model: CostModel, stage: int, exits: Sequence[tuple[int, Head]], exit_forward: ExitForward
) -> PartialCosts:
    """Compose the partial costs of one stage.

    A warm-up insert that turns here runs the layers below the stage's last exit and all its exits; the layers
    above would get no gradient. A truncated microbatch that only passes through runs all layers and no exit.
    Without exits no insert turns here, and its costs are those of the embedding alone.

    Args:
        exits: (layers computed before it, head) of each exit on the stage.
    """
    layer, overhead_ns = model.ops["layer"], to_ns(model.profile.microbatch_overhead_s)
    heads = [model.ops[EXIT_OPS[head.kind]] for _, head in exits]
    before = model.layout.first_layer(stage) - 1
    below = max((depth for depth, _ in exits), default=before) - before
    ops = [*([model.ops["embedding"]] if stage == 0 else []), *([layer] * below)]
    passed = ops + [layer] * (model.layout.layers_per_stage[stage] - below)
    if stage == model.layout.num_stages - 1:
        passed.append(model.ops["final_head"])
    eager, deferred = (heads, []) if exit_forward == "eager" else ([], heads)
    received_bytes = model.hidden_bytes if stage > 0 else 0
    return PartialCosts(
        turn_forward_ns=overhead_ns + sum(op.forward_ns for op in (*ops, *eager)),
        turn_backward_ns=sum(op.backward_ns for op in (*ops, *heads)) + sum(op.forward_ns for op in deferred),
        turn_kept_bytes=received_bytes + sum(op.kept_bytes for op in (*ops, *eager)),
        bare_forward_ns=overhead_ns + sum(op.forward_ns for op in passed),
    )


def with_partial_costs(costs: PipelineCosts, partial: Sequence[PartialCosts]) -> PipelineCosts:
    """``costs`` completed for filled schedules."""
    return replace(
        costs,
        turn_forward_ns=tuple(stage.turn_forward_ns for stage in partial),
        turn_backward_ns=tuple(stage.turn_backward_ns for stage in partial),
        turn_kept_bytes=tuple(stage.turn_kept_bytes for stage in partial),
        bare_forward_ns=tuple(stage.bare_forward_ns for stage in partial),
    )
