"""Expected decode latency of many configurations: one evaluation for each placement, threshold and prior."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from eeplan.profile import SECONDS, DecodeCosts, DecodeOpCost, OpProfile, timing_with
from eeplan.sim.decode_process import Exit
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import Layout
from eeplan.spec import RunSpec
from eeplan.sweep_outcome import DecodeOutcome
from eeplan.usage import Usage, exit_shares

_HEADS = ("exit_minimal", "exit_norm", "exit_mlp", "exit_block")


class DecodePredictor:
    """Predicts decoding with one profile; keeps what configurations share.

    Args:
        profile: with decode costs, or nothing is predicted.
        usage: measured; None takes each run's ``decode.prior``.
    """

    def __init__(self, profile: OpProfile, usage: Usage | None) -> None:
        self._profile, self._usage = profile, usage
        self._scaled: dict[int, OpProfile] = {profile.shape.padded_vocab_size: profile}
        self._known: dict[Hashable, DecodeOutcome] = {}

    def predict(self, run: RunSpec, layout: Layout, exits: Sequence[Exit]) -> DecodeOutcome | None:
        """Every mode of the model with these exits; None without decode costs.

        Raises:
            ProfileError: an exit's head kind has no decode costs.
        """
        if not self._profile.decode:
            return None
        key = (run.decode, run.padded_vocab_size, layout, tuple(exits))
        if key not in self._known:
            self._known[key] = self._judged(run, layout, exits)
        return self._known[key]

    def _judged(self, run: RunSpec, layout: Layout, exits: Sequence[Exit]) -> DecodeOutcome:
        size = run.padded_vocab_size
        if size not in self._scaled:
            self._scaled[size] = with_vocabulary(self._profile, size)
        profile, limit = self._scaled[size], run.decode.recompute_limit
        depths = [one.depth for one in exits]
        used = self._usage or run.decode.prior
        shares = exit_shares(used, run.decode.threshold, depths, layout.num_layers)
        found = {
            mode: decode_prediction(profile, layout, exits, shares, mode, limit)
            for mode in ("full", "kv_recompute", "catch_up", "pipeline")
            if mode != "pipeline" or layout.num_stages > 1
        }
        chosen, pipeline = found[run.decode.mode], found.get("pipeline")
        return DecodeOutcome(
            full_s=found["full"].ns_per_token / 1e9,
            kv_recompute_s=found["kv_recompute"].ns_per_token / 1e9,
            catch_up_s=found["catch_up"].ns_per_token / 1e9,
            pipeline_s=pipeline.ns_per_token / 1e9 if pipeline else None,
            speed_up=chosen.speed_up,
            mean_depth=chosen.mean_depth,
            usage_is_assumption=shares.is_assumption,
            estimated=size != self._profile.shape.padded_vocab_size,
        )


def with_vocabulary(profile: OpProfile, padded_vocab_size: int) -> OpProfile:
    """Decode costs with heads for another vocabulary: what the final head takes grows in proportion, and as
    much is added to the other heads, whose matrices are as large."""
    ratio = padded_vocab_size / profile.shape.padded_vocab_size
    return profile.model_copy(
        update={"decode": tuple(_scaled_costs(costs, ratio - 1.0) for costs in profile.decode)}
    )


def _scaled_costs(costs: DecodeCosts, growth: float) -> DecodeCosts:
    matrix = {cost.rows: cost for cost in costs.ops if cost.op == "final_head"}
    ops = []
    for cost in costs.ops:
        added = matrix.get(cost.rows, matrix.get(1))
        if added is not None and (cost.op == "final_head" or cost.op in _HEADS):
            cost = _longer(cost, added, growth)
        ops.append(cost)
    return costs.model_copy(update={"ops": tuple(ops)})


def _longer(cost: DecodeOpCost, added: DecodeOpCost, growth: float) -> DecodeOpCost:
    seconds = (
        max(0.0, getattr(cost.time, name) + growth * min(getattr(cost.time, name), getattr(added.time, name)))
        for name in SECONDS
    )
    return cost.model_copy(update={"time": timing_with(cost.time, seconds)})
