"""Op costs for another vocabulary than the measured one, marked.

A sweep asks for many vocabularies, a profile holds one. What heads cost with others is derived here, with
``extrapolated`` set, so that no derived number passes for a measured one.
"""

from __future__ import annotations

from eeplan.profile import SECONDS, ModelShape, OpCost, OpName, OpProfile, Timing, timing_with
from eeplan.spec import RunSpec

_HEADS: tuple[OpName, ...] = ("final_head", "exit_minimal", "exit_norm", "exit_mlp", "exit_block")


def adapted(profile: OpProfile, run: RunSpec) -> OpProfile:
    """The profile with what ``run`` needs beyond it, if that is only another vocabulary."""
    wanted = ModelShape.of(run)
    if profile.shape.model_copy(update={"padded_vocab_size": wanted.padded_vocab_size}) != wanted:
        # Of another model: whoever looks up a cost says so.
        return profile
    return with_vocabulary(profile, wanted.padded_vocab_size)


def with_vocabulary(profile: OpProfile, padded_vocab_size: int) -> OpProfile:
    """Heads scaled to another vocabulary: their matrix and logits are all but everything they do.

    An MLP or a block in front of an exit's matrix keeps its cost.
    """
    if padded_vocab_size == profile.shape.padded_vocab_size:
        return profile
    ratio = padded_vocab_size / profile.shape.padded_vocab_size
    finals = {(cost.micro_batch_size, cost.way): cost for cost in profile.ops if cost.op == "final_head"}
    ops = []
    for cost in profile.ops:
        matrix = finals.get((cost.micro_batch_size, cost.way))
        if cost.op in _HEADS and matrix is not None:
            cost = _scaled(cost, matrix, ratio)
        ops.append(cost)
    shape = profile.shape.model_copy(update={"padded_vocab_size": padded_vocab_size})
    return profile.model_copy(update={"shape": shape, "ops": tuple(ops)})


def _scaled(cost: OpCost, matrix: OpCost, ratio: float) -> OpCost:
    """``cost`` with the part of it that the output head makes up times ``ratio``."""

    def times(timing: Timing, of_matrix: Timing) -> Timing:
        share = min(of_matrix.mean_s / timing.mean_s, 1.0) if timing.mean_s else 0.0
        factor = 1.0 + share * (ratio - 1.0)
        return _timing(timing, factor)

    def size(bytes_of_cost: int, bytes_of_matrix: int) -> int:
        return max(0, round(bytes_of_cost + min(bytes_of_cost, bytes_of_matrix) * (ratio - 1.0)))

    return cost.model_copy(
        update={
            "forward": times(cost.forward, matrix.forward),
            "backward": times(cost.backward, matrix.backward),
            "kept_bytes": size(cost.kept_bytes, matrix.kept_bytes),
            "forward_transient_bytes": size(cost.forward_transient_bytes, matrix.forward_transient_bytes),
            "backward_transient_bytes": size(cost.backward_transient_bytes, matrix.backward_transient_bytes),
            "extrapolated": True,
        }
    )


def _timing(timing: Timing, factor: float) -> Timing:
    return timing_with(timing, (factor * getattr(timing, name) for name in SECONDS))
