"""Which link carries what: messages between stages, reductions between ranks, inside a node or between nodes.

Ranks are numbered as in Megatron, tensor-parallel innermost, then data-parallel, then pipeline: rank i of
tensor, j of data and k of pipeline parallelism is ``(k d + j) t + i``, on node ``rank // gpus_per_node``.
Tensor-parallel ranks share a node, so nodes can be told from k and j alone. A group is as fast as its slowest
member's line: one that crosses nodes uses the line between nodes.
"""

from __future__ import annotations

from eeplan.errors import ProfileError
from eeplan.profile import OpProfile, Transfer
from eeplan.spec import ParallelSpec, RunSpec


def require_links(profile: OpProfile, run: RunSpec) -> None:
    """Refuse a profile without lines between nodes for a run that needs them.

    Raises:
        ProfileError: says which are missing.
    """
    parallel, lines = run.parallel, ("p2p_between_nodes", "all_reduce_between_nodes")
    missing = [name for name in lines if getattr(profile, name) is None]
    if parallel.num_nodes > 1 and missing:
        raise ProfileError(
            f"parallel.gpus_per_node {parallel.gpus_per_node} puts {parallel.world_size} ranks on "
            f"{parallel.num_nodes} nodes, and the profile has no {' and no '.join(missing)}; add them as "
            "{latency_s, bandwidth_bytes_per_s}, or leave parallel.gpus_per_node out"
        )


def message_transfer(profile: OpProfile, parallel: ParallelSpec, stage: int) -> Transfer:
    """The line from ``stage`` to the next one; the slowest of its ranks' when they differ."""
    here, there = (_nodes(parallel, one) for one in (stage, stage + 1))
    crosses = any(one != other for one, other in zip(here, there, strict=True))
    return _line(profile.p2p, profile.p2p_between_nodes, crosses)


def data_transfer(profile: OpProfile, parallel: ParallelSpec, stage: int) -> Transfer:
    """The line that the data-parallel ranks of ``stage`` reduce over."""
    crosses = len(set(_nodes(parallel, stage))) > 1
    return _line(profile.all_reduce, profile.all_reduce_between_nodes, crosses)


def shared_transfer(profile: OpProfile, parallel: ParallelSpec) -> Transfer:
    """The line that stages reduce the shared vocabulary matrix over.

    That between nodes where the first and the last stage are on different ones. A model that unties its
    embedding may have all copies on later stages, which is then taken as slower than it is.
    """
    ends = (_nodes(parallel, stage) for stage in (0, parallel.pipeline_model_parallel_size - 1))
    crosses = any(one != other for one, other in zip(*ends, strict=True))
    return _line(profile.all_reduce, profile.all_reduce_between_nodes, crosses)


def _nodes(parallel: ParallelSpec, stage: int) -> list[int]:
    """Node of each data-parallel rank of a stage."""
    data_ranks = parallel.data_parallel_size
    if parallel.gpus_per_node is None:
        return [0] * data_ranks
    per_node = parallel.gpus_per_node // parallel.tensor_model_parallel_size
    return [(stage * data_ranks + rank) // per_node for rank in range(data_ranks)]


def _line(inside: Transfer, between: Transfer | None, crosses: bool) -> Transfer:
    if not crosses:
        return inside
    assert between is not None, "require_links has refused such a profile"
    return between
