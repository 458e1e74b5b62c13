"""Sentences for people: why a choice was made, what came second, and why nothing fits.

Stages count from 0 in texts, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from eeplan.plan import Decision
from eeplan.sim.layout import Layout, Slot, nearly_even_layout, squared_gaps
from eeplan.sim.memory import memory_breakdown
from eeplan.sim.search import Candidate, Outcome
from eeplan.spec import RunSpec

SPLIT = "layers per stage"
"""Subject of the decision on the layer split."""


def overhead(candidate: Candidate, baseline: Candidate) -> float:
    """Relative slow-down of an iteration."""
    return candidate.iteration_ns / baseline.iteration_ns - 1.0


def format_ns(nanoseconds: int) -> str:
    """Seconds or milliseconds with four digits."""
    return f"{nanoseconds / 1e9:.4g} s" if nanoseconds >= 10**9 else f"{nanoseconds / 1e6:.4g} ms"


def format_bytes(size: int) -> str:
    """Binary units with three digits, e.g. ``1.25 GiB``."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.2f} {units[0]}"


def format_percent(fraction: float) -> str:
    """Signed, two decimals."""
    return f"{100 * fraction:+.2f} %"


def infeasible(candidate: Candidate) -> str:
    """Why ``candidate``, the smallest there is, breaks the device limit: where, and by how much."""
    limit = candidate.model.run.limits.device_memory_bytes
    assert limit is not None, "without a limit everything fits"
    stage = max(range(len(candidate.stages)), key=lambda index: candidate.peak_bytes[index])
    peak, parts = candidate.peak_bytes[stage], memory_breakdown(candidate.model, candidate.stages, stage)
    return (
        f"limits.device_memory_bytes is {_both(limit)}, but stage {stage} of {len(candidate.stages)} "
        f"needs {_both(peak)} with {_exits(sum(candidate.counts))}, {_both(peak - limit)} too much: "
        f"{format_bytes(parts.state_bytes)} parameters, gradients and optimizer state, "
        f"{format_bytes(parts.activation_bytes)} activations of {parts.in_flight} microbatches, "
        f"{format_bytes(parts.transient_bytes)} temporaries, "
        f"{format_bytes(parts.process_base_bytes)} process"
    )


def no_exits_wanted() -> Decision:
    """For a run file that asks for no exits."""
    return Decision(subject="exits.count", choice="0", reason="the run file asks for no exits")


def count_by_hand(count: int) -> Decision:
    """For exits listed in ``exits.layers``."""
    return Decision(subject="exits.count", choice=str(count), reason="exits.layers names them")


def count_given(count: int) -> Decision:
    """For ``exits.count: k``."""
    return Decision(subject="exits.count", choice=str(count), reason="set in the run file")


def count_automatic(
    run: RunSpec, count: int, best: Candidate | None, above: Candidate | None, baseline: Candidate
) -> Decision:
    """For ``exits.count: auto``.

    Args:
        count: chosen number.
        best: with that many exits; None for no exits.
        above: the best with one exit more, which was rejected, the smallest if none fits; None when ``count``
            is the most allowed.
    """
    allowed = f"limits.max_time_overhead {100 * run.limits.max_time_overhead:g} %"
    if best is not None:
        reason = f"{format_percent(overhead(best, baseline))} iteration time, within {allowed}"
        reason += ", and fits in memory; " if run.limits.device_memory_bytes else "; "
        most = min(run.exits.max_count, run.model.num_layers - 1)
        reason += f"the most allowed is {most}" if count == most else "the most for which that holds"
    else:
        reason = (
            "not even one exit stays within the limits" if above else "a single layer has no room for exits"
        )
    rejected = ""
    if above is not None and above.fits(run.limits.device_memory_bytes):
        slower = format_percent(overhead(above, baseline))
        rejected = f"{_exits(count + 1)}: {slower} iteration time, over {allowed}"
    elif above is not None:
        rejected = f"{_exits(count + 1)}: {_misfit(above)}, over limits.device_memory_bytes"
    return Decision(subject="exits.count", choice=str(count), reason=reason, rejected=rejected)


def placement(
    outcome: Outcome,
    best: Candidate,
    slots: Sequence[Slot],
    runner_up: Candidate | None,
    baseline: Candidate,
) -> Decision:
    """For exits that the search has placed.

    Args:
        best: of ``outcome``.
        slots: where its exits read.
        runner_up: the best with other exits per stage, None if there is none.
    """
    layers = best.layout.num_layers
    wasted = squared_gaps([slot.depth for slot in slots], layers) / (2 * layers)
    reason = (
        f"fastest iteration: {_numbers(best, baseline)}. Among equals the fewest layers in vain: "
        f"{wasted:.3g} for a token that needs a uniformly drawn depth"
    )
    too_large = outcome.faster_but_too_large
    second = too_large or runner_up
    rejected = ""
    if second is not None:
        rejected = f"{_counts(second)} ({second.exit_forward}): {_numbers(second, baseline)}"
        if second is too_large:
            rejected += f"; faster, but {_misfit(second)}, over limits.device_memory_bytes"
        elif second.rank[::2] == best.rank[::2]:
            rejected += "; equal in both, but with more overshoot"
    return Decision(subject="exits.placement", choice=_slots(slots), reason=reason, rejected=rejected)


def placement_by_hand(
    slots: Sequence[Slot], best: Candidate, baseline: Candidate, improved: Candidate | None
) -> Decision:
    """For exits listed in the run file; points out when reading them one stage later would be cheaper.

    Args:
        improved: the same exits with those at the end of a stage read at the start of the next.
    """
    reason = f"set in the run file: {_numbers(best, baseline)}"
    if improved is not None and improved.rank < best.rank:
        reason += (
            "; the exits at the end of a stage would cost less if read 'before' the next layer, on the next "
            f"stage: {_numbers(improved, baseline)}"
        )
    return Decision(subject="exits.placement", choice=_slots(slots), reason=reason)


def exit_forward(best: Candidate, other: Candidate | None) -> Decision:
    """Where exit forwards run; ``other`` is the same placement run the other way, None if not allowed."""
    subject, choice = "exits.exit_forward", best.exit_forward
    if other is None:
        return Decision(subject=subject, choice=choice, reason="set in the run file")
    gain_ns = best.iteration_ns - other.iteration_ns
    if choice == "eager":
        reason = (
            f"strictly faster than deferred by {format_ns(-gain_ns)}"
            if gain_ns < 0
            else f"deferred does not fit: {_misfit(other)}"
        )
    elif gain_ns > 0:
        reason = f"eager would be faster by {format_ns(gain_ns)}, but {_misfit(other)}, over the memory limit"
    else:
        reason = "eager is not faster, and deferred keeps no logits between forward and backward"
    return Decision(
        subject=subject,
        choice=choice,
        reason=f"{reason} (EE-LLM 3.2, Optimization 1)",
        rejected=f"{other.exit_forward}: {format_ns(other.iteration_ns)}, {_peak(other)}",
    )


def layer_split(run: RunSpec, layout: Layout) -> Decision:
    """The split that the run file asks for."""
    reason = "equal layers on every stage" if run.parallel.layer_split == "uniform" else "set in the run file"
    return Decision(subject=SPLIT, choice=_layers(layout), reason=reason)


def free_layer_split(best: Candidate, even: Candidate | None) -> Decision:
    """The split that the search has chosen.

    Args:
        even: the best with layers as even as possible; None if that is ``best``, or does not fit.
    """
    reason = "the fastest split together with the exits"
    rejected = ""
    if even is not None:
        slower = format_percent(even.iteration_ns / best.iteration_ns - 1.0)
        rejected = (
            f"{_layers(even.layout)}, as even as possible: {format_ns(even.iteration_ns)} ({slower}), "
            f"{_peak(even)}"
        )
    elif best.layout == nearly_even_layout(best.layout.num_layers, best.layout.num_stages):
        reason += ", and as even as possible"
    else:
        rejected = "layers as even as possible do not fit limits.device_memory_bytes"
    return Decision(subject=SPLIT, choice=_layers(best.layout), reason=reason, rejected=rejected)


def _numbers(candidate: Candidate, baseline: Candidate) -> str:
    time = (
        f"{format_ns(candidate.iteration_ns)} ({format_percent(overhead(candidate, baseline))} over no exits)"
    )
    return f"{time}, {_peak(candidate)}"


def _peak(candidate: Candidate) -> str:
    stage = max(range(len(candidate.peak_bytes)), key=lambda index: candidate.peak_bytes[index])
    return f"peak {format_bytes(candidate.peak_bytes[stage])} on stage {stage}"


def _misfit(candidate: Candidate) -> str:
    stage = max(range(len(candidate.peak_bytes)), key=lambda index: candidate.peak_bytes[index])
    return f"stage {stage} needs {format_bytes(candidate.peak_bytes[stage])}"


def _layers(layout: Layout) -> str:
    return ", ".join(map(str, layout.layers_per_stage))


def _counts(candidate: Candidate) -> str:
    return f"exits per stage {', '.join(map(str, candidate.counts))}"


def _slots(slots: Sequence[Slot]) -> str:
    return ", ".join(f"{slot.boundary} layer {slot.layer} (stage {slot.stage})" for slot in slots)


def _both(size: int) -> str:
    return f"{format_bytes(size)} ({size} bytes)"


def _exits(count: int) -> str:
    if count == 0:
        return "no exits"
    return "1 exit" if count == 1 else f"{count} exits"
