"""Closed forms of a 1F1B pipeline: iteration time, its bound, memory, and what fits into the bubbles.

None of them knows message latency; the engine does. Each docstring says what is proved and what is only
tested. Stages are numbered from 0 here; P stages, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import per_stage
from eeplan.sim.fill import Fill


def upper_bound_ns(
    backbone_ns: int,
    exit_ns: Sequence[int],
    num_microbatches: int,
    *,
    embedding_ns: int = 0,
    final_ns: int = 0,
) -> int:
    """Bound on the pipeline part of an iteration with early exits (EE-LLM 3.2).

    All arguments are forward plus backward of one microbatch. Assumes 1F1B, the same backbone on every stage
    and free messages; exits may differ, and their forward may run in either step.

    Not a bound without limit: a huge extra forward on one stage and a huge extra backward on another exceed
    it (by up to 27 % found, with backbones of no time at all). Sufficient: let x be the largest extra forward
    of any stage beyond the backbone's, y the largest extra backward; min(x, y) <= f_BB + b_BB. With M >= P
    that follows from the exact closed form: the bound's bottleneck t satisfies t >= f_BB + b_BB + max(x, y),
    so the slowest forward and the slowest backward sum to at most t + f_BB + b_BB, and every term of the
    closed form stays below. For M < P, and for the closed form itself, it is empirical (tested).

    Args:
        backbone_ns: the backbone of one stage; give the largest when they differ (more work on a stage never
            shortens the run, so the bound stays one).
        exit_ns: all early exits of each stage together, length P.
        num_microbatches: M.
        embedding_ns: input embedding, on the first stage.
        final_ns: final exit with its loss, on the last stage.
    """
    last = len(exit_ns) - 1
    bottleneck_ns = max(
        backbone_ns + exits + (embedding_ns if stage == 0 else 0) + (final_ns if stage == last else 0)
        for stage, exits in enumerate(exit_ns)
    )
    ramp_ns = embedding_ns + last * backbone_ns + sum(exit_ns[:-1])
    return ramp_ns + num_microbatches * bottleneck_ns


def closed_form_ns(forward_ns: Sequence[int], backward_ns: Sequence[int], num_microbatches: int) -> int:
    """Exact makespan of 1F1B with any stage times, free messages and M >= P, in O(P).

    Every term is the length of a dependency path when M > P, so the makespan is proved to be at least this;
    that it is never more is empirical (tested against the engine and the longest path on random stages).

    With F_j, B_j the sums over stages 0..j, f_max, b_max the largest up to j, and w_j = P-1-j, the result is

        max_i  max_{j>=i}(F_j + B_j + w_j f_max_j) + max_{j>=i}(F_j + B_j + w_j b_max_j)
               - F_{i-1} - B_{i-1} + (M - 2 - w_i) (f_i + b_i)

    Args:
        forward_ns: one microbatch's forward on each stage, length P.
        backward_ns: its backward.
        num_microbatches: M.

    Raises:
        ValueError: M < P, where it does not hold.
    """
    num_stages = len(forward_ns)
    if num_microbatches < num_stages:
        raise ValueError(
            f"the closed form needs at least as many microbatches as stages, got {num_microbatches} "
            f"for {num_stages}; use the engine"
        )
    work = [f + b for f, b in zip(forward_ns, backward_ns, strict=True)]
    through = list(accumulate(work))
    slowest_forward = list(accumulate(forward_ns, max))
    slowest_backward = list(accumulate(backward_ns, max))
    ramp_up = ramp_down = makespan = 0
    for stage in reversed(range(num_stages)):
        below = num_stages - 1 - stage
        ramp_up = max(ramp_up, through[stage] + below * slowest_forward[stage])
        ramp_down = max(ramp_down, through[stage] + below * slowest_backward[stage])
        before = through[stage] - work[stage]
        makespan = max(makespan, ramp_up + ramp_down - before + (num_microbatches - 2 - below) * work[stage])
    return makespan


def in_flight_microbatches(num_stages: int, num_microbatches: int, stage: int) -> int:
    """Most microbatches that ``stage`` (from 0) holds between forward and backward: min(P-i, M) (EE-LLM 3.2).

    Proved: 1F1B runs min(P-1-i, M) forwards ahead, then one more before each backward.
    """
    return min(num_stages - stage, num_microbatches)


def peak_bytes(costs: PipelineCosts, num_microbatches: int) -> tuple[int, ...]:
    """Peak of each stage's live bytes: static, what min(P-i, M) microbatches keep, the larger transient.

    Proved: both the last forward of the fill and the backward after it run with that many microbatches in
    flight, and no op runs with more. Equals the engine's memory peak to the byte.
    """
    stages = range(costs.num_stages)
    columns = (
        costs.static_bytes,
        costs.kept_bytes,
        costs.forward_transient_bytes,
        costs.backward_transient_bytes,
    )
    static, kept, forward_transient, backward_transient = (
        per_stage(column, costs.num_stages) for column in columns
    )
    return tuple(
        static[i]
        + in_flight_microbatches(costs.num_stages, num_microbatches, i) * kept[i]
        + max(forward_transient[i], backward_transient[i])
        for i in stages
    )


def filled_activation_bytes(costs: PipelineCosts, fill: Fill, stage: int) -> int:
    """What a stage keeps when its first backward runs, or the backward of its last warm-up insert.

    That is the most that it ever keeps: full and truncated microbatches as in 1F1B, and its inserts.
    """
    kept = per_stage(costs.kept_bytes, costs.num_stages)[stage]
    turn_kept = per_stage(costs.turn_kept_bytes or costs.kept_bytes, costs.num_stages)[stage]
    turning = fill.turning_on(stage)
    whole = fill.held_at_first_backward(stage, costs.num_stages) + fill.warm_up_on(stage) - turning
    return whole * kept + turning * turn_kept


def filled_peak_bytes(costs: PipelineCosts, fill: Fill) -> tuple[int, ...]:
    """:func:`peak_bytes` with partial microbatches in the bubbles (EE-LLM C.2).

    Both the last insert's forward and the backward after it run with :func:`filled_activation_bytes`, and no
    op with more. Region B adds nothing where M >= P: its microbatches take the places of full ones that are
    done. With fewer, a forward that keeps nothing may be the highest. Equals the engine's peak to the byte
    (tested).
    """
    num_stages = costs.num_stages
    columns = (
        costs.static_bytes,
        costs.kept_bytes,
        costs.forward_transient_bytes,
        costs.backward_transient_bytes,
    )
    peaks = []
    for stage, values in enumerate(zip(*(per_stage(c, num_stages) for c in columns), strict=True)):
        static, kept, forward_transient, backward_transient = values
        transient = max(forward_transient, backward_transient)
        peak = filled_activation_bytes(costs, fill, stage) + transient
        held = fill.held_at_first_backward(stage, num_stages)
        if min(num_stages - stage, fill.num_full + len(fill.reaches)) > held:
            peak = max(peak, (held + 1) * kept + forward_transient)
        peaks.append(static + peak)
    return tuple(peaks)


def bubble_fill_capacity(num_stages: int, forward_ns: int, backward_ns: int) -> int:
    """Partial microbatches that fit one explicit bubble region: K = floor((P-1) / (f/b + 1)) (EE-LLM 3.3).

    Stated in the paper for equal stages without exits; with exits or unequal stages it is only a start.
    Computed in integers: K is the largest number with K (f+b) <= (P-1) b.
    """
    work = forward_ns + backward_ns
    return (num_stages - 1) * backward_ns // work if work else 0
