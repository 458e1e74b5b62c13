"""One configuration's time, memory and decode latency, sharing work between configurations.

Configurations differ in few things at a time, so stage costs, placements and decode processes are kept and
used again. What that does not cover goes to the planner itself, a few hundred times slower: a free layer
split, several head kinds, exits placed for decoding, open numbers of stages or microbatch sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from eeplan.errors import ProfileError
from eeplan.plan import Certificate
from eeplan.profile import OpProfile
from eeplan.profile_scaling import adapted
from eeplan.sim.choice import Choice, PlacedExit, wanted_kinds
from eeplan.sim.costs import CostModel, cost_model, to_ns
from eeplan.sim.decode_process import Exit
from eeplan.sim.fill_choice import choose_fill
from eeplan.sim.layout import Layout, Slot, layout_of, least_overshoot
from eeplan.sim.planner import make_plan
from eeplan.sim.search import judge
from eeplan.spec import ExitForward, RunSpec
from eeplan.sweep_batches import Batch, Integers, batch_of, least, modes_of, peaks_of
from eeplan.sweep_decode import DecodePredictor
from eeplan.sweep_outcome import DecodeOutcome, Outcome, outcome_of
from eeplan.usage import ExitUsage, Usage, UsagePrior

_Key = tuple[Hashable, ...]
_NO_DECODING = DecodeOutcome()
_NO_PROOF = Certificate(optimal=True, evaluated=0, space_size=0)


@dataclass(frozen=True, slots=True)
class _Best:
    """The best candidate that fits, or None, and the least peak of any."""

    batch: Batch
    row: int | None
    pipeline_ns: int
    grad_sync_ns: int
    iteration_ns: int
    peak_bytes: int
    peak_stage: int


@dataclass(frozen=True, slots=True)
class _Shared:
    """Costs that runs share, and the first of those runs."""

    run: RunSpec
    model: CostModel | ProfileError
    """The error when the profile has no costs for them."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """The exits of one candidate at the depths that the planner would take, and how a row tells them."""

    exits: tuple[PlacedExit, ...]
    points: tuple[Exit, ...]
    """The same for the decode model."""
    mode: ExitForward
    counts: str
    depths: str
    layers: str


class Predictor:
    """Predicts runs with one profile; keeps what runs share.

    Args:
        profile: op costs; other microbatch sizes and vocabularies are derived from it, and the rows say so.
        usage: how often tokens leave early; None takes each run's ``decode.prior``.
    """

    def __init__(self, profile: OpProfile, usage: Usage | None = None) -> None:
        self._profile, self._usage = profile, usage
        self._decode = DecodePredictor(profile, usage)
        self._models: dict[Hashable, _Shared] = {}
        self._batches: dict[Hashable, Batch] = {}
        self._peaks: dict[Hashable, tuple[Integers, Integers]] = {}
        self._best: dict[Hashable, _Best] = {}
        self._placements: dict[Hashable, _Placement] = {}

    def predict(self, run: RunSpec) -> Outcome:
        """Time, memory and decoding of ``run``.

        Raises:
            ProfileError: the profile is of another model, or lacks an op.
            PlanInfeasible: fills by hand, or an open choice, that fit no limit.
        """
        if _is_open(run):
            return self._planned(run)
        key, model = self._model(run)
        limit = run.limits.device_memory_bytes
        baseline = self._judged(key, model, run, 0, None)
        for count in _counts_to_try(run):
            best = self._judged(key, model, run, count, limit)
            if best.row is None:
                if run.exits.count == "auto" and count:
                    continue
                return self._infeasible(model, run, count, best)
            overhead = best.iteration_ns / baseline.iteration_ns - 1.0
            if run.exits.count != "auto" or not count or overhead <= run.limits.max_time_overhead:
                return self._feasible(model, run, count, best, baseline)
        raise AssertionError("trying no exits at all is the last resort")

    def _planned(self, run: RunSpec) -> Outcome:
        profile = adapted(self._profile, run)
        usage = None
        if self._usage is not None:
            usage = ExitUsage.model_validate({"schema_version": 1, _usage_key(self._usage): self._usage})
        return outcome_of(make_plan(run, "", profile, "", usage))

    def _model(self, run: RunSpec) -> tuple[tuple[_Key, _Key], CostModel]:
        """Costs of everything that two runs with the same key share; only their batch and limits differ.

        The key has a part without exits and one that says how they look.
        """
        training, exits = run.training, run.exits
        # Comparing identities is fast; the objects are kept, so an identity is never given out twice.
        bare = (
            *(id(run.model), id(run.parallel), training.micro_batch_size, training.seq_length),
            *(training.precision, training.recompute_granularity),
        )
        looks = (exits.head, exits.untie_exit_output_weights, exits.layers, exits.distillation)
        key = bare, looks
        known = self._models.get(key)
        if known is None:
            known = self._models[key] = _Shared(run, self._cost_model(run))
        if isinstance(known.model, ProfileError):
            raise known.model
        return key, known.model

    def _cost_model(self, run: RunSpec) -> CostModel | ProfileError:
        kinds = wanted_kinds(run.exits) | {run.exits.head_kind}
        try:
            return cost_model(run, adapted(self._profile, run), layout_of(run), kinds)
        except ProfileError as error:
            return error

    def _judged(
        self, key: tuple[_Key, _Key], model: CostModel, run: RunSpec, count: int, limit: int | None
    ) -> _Best:
        modes = modes_of(run.exits)
        # Without exits nothing depends on what they would have been.
        batch_key = (key, count, modes) if count else (key[0], 0)
        best_key = (batch_key, run.num_microbatches, limit)
        if best_key not in self._best:
            if batch_key not in self._batches:
                self._batches[batch_key] = batch_of(model, run.exits, count, modes)
            self._best[best_key] = self._find(batch_key, model, run.num_microbatches, limit)
        return self._best[best_key]

    def _find(self, key: Hashable, model: CostModel, num_microbatches: int, limit: int | None) -> _Best:
        batch, stages = self._batches[key], model.layout.num_stages
        peaks_key = (key, min(num_microbatches, stages))
        if peaks_key not in self._peaks:
            self._peaks[peaks_key] = peaks_of(batch, num_microbatches, model.profile.process_base_bytes)
        peaks, at_stage = self._peaks[peaks_key]
        allowed = np.arange(len(peaks)) if limit is None else np.flatnonzero(peaks <= limit)
        if not len(allowed):
            smallest = int(peaks.argmin())
            return _Best(batch, None, 0, 0, 0, int(peaks[smallest]), int(at_stage[smallest]))
        row, pipeline, sync, iteration = least(batch, allowed, peaks, num_microbatches)
        overhead = to_ns(model.profile.iteration_overhead_s)
        return _Best(batch, row, pipeline, sync, iteration + overhead, int(peaks[row]), int(at_stage[row]))

    def _feasible(self, model: CostModel, run: RunSpec, count: int, best: _Best, baseline: _Best) -> Outcome:
        batch, training = best.batch, run.training
        assert best.row is not None, "only a candidate that fits is feasible"
        placed = self._placed(run, model, batch, best.row)
        pipeline_ns, sync_ns, iteration_ns = best.pipeline_ns, best.grad_sync_ns, best.iteration_ns
        peak_bytes, warm_up, cool_down = best.peak_bytes, 0, 0
        if run.fill.policy != "none":
            # What the planner does with its choice: the counts do not depend on how that was found.
            found = judge(replace(model, run=run), [(placed.mode, batch.stages[best.row])])[0]
            filled = choose_fill(found.model, Choice(placed.exits, found, found, (), _NO_PROOF))
            pipeline_ns, sync_ns = filled.candidate.pipeline_ns, filled.candidate.grad_sync_ns
            iteration_ns, peak_bytes = filled.candidate.iteration_ns, max(filled.candidate.peak_bytes)
            warm_up, cool_down = len(filled.fill.depths), len(filled.fill.reaches)
        decode = self._decode.predict(run, model.layout, placed.points) or _NO_DECODING
        seconds = iteration_ns / 1e9
        used = {"exit_" + run.exits.head_kind} if count and not run.exits.layers else set()
        extrapolated, interpolated = (
            [op for op in ops if run.exits.layers or not op.startswith("exit_") or op in used]
            for ops in (model.extrapolated_ops, model.interpolated_ops)
        )
        if decode.estimated:
            extrapolated.append("decode_heads")
        return Outcome(
            feasible=True,
            num_microbatches=run.num_microbatches,
            num_exits=len(placed.exits),
            exits_per_stage=placed.counts,
            exit_depths=placed.depths,
            layers_per_stage=placed.layers,
            exit_forward=placed.mode,
            iteration_time_s=seconds,
            pipeline_s=pipeline_ns / 1e9,
            grad_sync_s=sync_ns / 1e9,
            optimizer_s=int(batch.optimizer_ns[best.row]) / 1e9,
            time_overhead=iteration_ns / baseline.iteration_ns - 1.0,
            tokens_per_s=training.global_batch_size * training.seq_length / seconds,
            peak_bytes=peak_bytes,
            fill_warm_up=warm_up,
            fill_cool_down=cool_down,
            decode_full_s=decode.full_s,
            decode_kv_recompute_s=decode.kv_recompute_s,
            decode_catch_up_s=decode.catch_up_s,
            decode_pipeline_s=decode.pipeline_s,
            decode_speed_up=decode.speed_up,
            decode_mean_depth=decode.mean_depth,
            usage_is_assumption=decode.usage_is_assumption,
            extrapolated_ops=" ".join(extrapolated),
            interpolated_ops=" ".join(interpolated),
        )

    def _placed(self, run: RunSpec, model: CostModel, batch: Batch, row: int) -> _Placement:
        key = id(batch), row
        if key not in self._placements:
            heads = [head for stage in batch.stages[row] for head in stage.heads]
            counts, slots = batch.counts[row].tolist(), _slots(run, model.layout, batch, row)
            self._placements[key] = _Placement(
                exits=tuple(PlacedExit(slot, head, None) for slot, head in zip(slots, heads, strict=True)),
                points=tuple(
                    Exit(slot.depth, head.kind, slot.stage) for slot, head in zip(slots, heads, strict=True)
                ),
                mode="eager" if batch.is_eager[row] else "deferred",
                counts=" ".join(map(str, counts)),
                depths=" ".join(str(slot.depth) for slot in slots),
                layers=" ".join(map(str, model.layout.layers_per_stage)),
            )
        return self._placements[key]

    @staticmethod
    def _infeasible(model: CostModel, run: RunSpec, count: int, best: _Best) -> Outcome:
        limit = run.limits.device_memory_bytes
        return Outcome(
            feasible=False,
            reason=(
                f"limits.device_memory_bytes: {limit} is less than the {best.peak_bytes} bytes that stage "
                f"{best.peak_stage} of {model.layout.num_stages} needs at least"
            ),
            num_microbatches=run.num_microbatches,
            num_exits=count or len(run.exits.layers),
            peak_bytes=best.peak_bytes,
        )


def _slots(run: RunSpec, layout: Layout, batch: Batch, row: int) -> tuple[Slot, ...]:
    """Where the exits of a candidate read."""
    if batch.heads:
        requests = sorted(run.exits.layers, key=lambda request: request.depth)
        return tuple(Slot(one.depth, layout.stage_of(one), one.layer, one.boundary) for one in requests)
    found = least_overshoot(batch.counts[row].tolist(), layout)
    assert found is not None, "candidates have room for their exits"
    return found[1]


def _is_open(run: RunSpec) -> bool:
    """Whether the planner has more to choose than how many exits go where."""
    exits, search = run.exits, run.search
    return bool(
        run.parallel.layer_split == "auto"
        or (exits.objective == "decode_speed_up" and exits.count)
        or len(exits.head_kinds) > 1
        or search.pipeline_model_parallel_size
        or search.micro_batch_size
    )


def _usage_key(usage: Usage) -> str:
    return "prior" if isinstance(usage, UsagePrior) else "measured"


def _counts_to_try(run: RunSpec) -> Iterator[int]:
    """Numbers of exits in the planner's order: from the most allowed down for ``auto``."""
    if run.exits.count == "auto":
        yield from range(min(run.exits.max_count, run.model.num_layers - 1), -1, -1)
    else:
        yield run.exits.count or len(run.exits.layers)
