"""Op costs at sizes next to the measured ones: another microbatch, another vocabulary. All marked.

A sweep asks for many sizes, a profile holds few. What can be told from its neighbours is derived here, with
``extrapolated`` set, so that no derived number passes for a measured one.
"""

from __future__ import annotations

from itertools import pairwise

from eeplan.errors import ProfileError
from eeplan.profile import ModelShape, OpCost, OpName, OpProfile, Timing
from eeplan.spec import RunSpec

_HEADS: tuple[OpName, ...] = ("final_head", "exit_minimal", "exit_norm", "exit_mlp", "exit_block")


def adapted(profile: OpProfile, run: RunSpec) -> OpProfile:
    """The profile with what ``run`` needs beyond it, if that is only another microbatch size or vocabulary.

    Raises:
        ProfileError: the profile has a single microbatch size, which makes no line.
    """
    wanted = ModelShape.of(run)
    if profile.shape.model_copy(update={"padded_vocab_size": wanted.padded_vocab_size}) != wanted:
        # Of another model: whoever looks up a cost says so.
        return profile
    return with_micro_batch_size(
        with_vocabulary(profile, wanted.padded_vocab_size),
        run.training.micro_batch_size,
        run.parallel.tensor_model_parallel_size,
    )


def with_vocabulary(profile: OpProfile, padded_vocab_size: int) -> OpProfile:
    """Heads scaled to another vocabulary: their matrix and logits are all but everything they do.

    An MLP or a block in front of an exit's matrix keeps its cost.
    """
    if padded_vocab_size == profile.shape.padded_vocab_size:
        return profile
    ratio = padded_vocab_size / profile.shape.padded_vocab_size
    finals = {
        (cost.micro_batch_size, cost.tensor_model_parallel_size): cost
        for cost in profile.ops
        if cost.op == "final_head"
    }
    ops = []
    for cost in profile.ops:
        matrix = finals.get((cost.micro_batch_size, cost.tensor_model_parallel_size))
        if cost.op in _HEADS and matrix is not None:
            cost = _scaled(cost, matrix, ratio)
        ops.append(cost)
    shape = profile.shape.model_copy(update={"padded_vocab_size": padded_vocab_size})
    return profile.model_copy(update={"shape": shape, "ops": tuple(ops)})


def with_micro_batch_size(profile: OpProfile, size: int, tensor_parallel: int) -> OpProfile:
    """Every op at another microbatch size, on the line through its two nearest measured sizes.

    Raises:
        ProfileError: an op was measured at one size only.
    """
    known = [cost for cost in profile.ops if cost.tensor_model_parallel_size == tensor_parallel]
    if not known or any(cost.micro_batch_size == size for cost in known):
        return profile
    by_op: dict[OpName, dict[int, OpCost]] = {}
    for cost in known:
        by_op.setdefault(cost.op, {})[cost.micro_batch_size] = cost
    added = tuple(_between(costs, size) for costs in by_op.values())
    return profile.model_copy(update={"ops": (*profile.ops, *added)})


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
    fields = ("median_s", "mean_s", "p10_s", "p90_s")
    return timing.model_copy(update={name: factor * getattr(timing, name) for name in fields})


def _between(costs: dict[int, OpCost], size: int) -> OpCost:
    measured = sorted(costs)
    if len(measured) == 1:
        raise ProfileError(
            f"profile has '{costs[measured[0]].op}' at micro_batch_size {measured[0]} only; a line to {size} "
            "needs two sizes; profile another one"
        )
    low, high = min(pairwise(measured), key=lambda pair: max(pair[0] - size, size - pair[1], 0))
    weight = (size - low) / (high - low)
    one, other = costs[low], costs[high]

    def line(at_low: float, at_high: float) -> float:
        return max(0.0, at_low + weight * (at_high - at_low))

    def times(at_low: Timing, at_high: Timing) -> Timing:
        fields = ("median_s", "mean_s", "p10_s", "p90_s")
        values = {name: line(getattr(at_low, name), getattr(at_high, name)) for name in fields}
        return at_low.model_copy(update=values)

    sizes = ("kept_bytes", "forward_transient_bytes", "backward_transient_bytes")
    return one.model_copy(
        update={
            "micro_batch_size": size,
            "forward": times(one.forward, other.forward),
            "backward": times(one.backward, other.backward),
            **{name: round(line(getattr(one, name), getattr(other, name))) for name in sizes},
            "extrapolated": True,
        }
    )
