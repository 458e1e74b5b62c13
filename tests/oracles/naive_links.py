"""Nodes, messages and rings written out: every rank gets its node, every group is looked through."""

from __future__ import annotations

from itertools import product

from eeplan.profile import OpProfile, Transfer
from eeplan.spec import RunSpec


def line_of(run: RunSpec, profile: OpProfile, name: str, stages: tuple[int, int]) -> Transfer:
    """The line between nodes if any rank exchanges anything with a rank on another node.

    Args:
        name: ``p2p`` or ``all_reduce``.
        stages: two whose ranks exchange with their likes, or twice one that reduces over its own.
    """
    parallel, (here, there) = run.parallel, stages
    t, d = parallel.tensor_model_parallel_size, parallel.data_parallel_size

    def node(i: int, j: int, k: int) -> int:
        return (k * d * t + j * t + i) // (parallel.gpus_per_node or 10**9)

    crosses = any(
        node(i, j, here) != node(i, other, there)
        for i, j, other in product(range(t), range(d), range(d))
        if here == there or j == other
    )
    found: Transfer = getattr(profile, f"{name}_between_nodes" if crosses else name)
    return found


def message_ns(line: Transfer, size_bytes: int) -> int:
    """Latency and transfer, each to the nearest ns."""
    return round(line.latency_s * 1e9) + round(size_bytes / line.bandwidth_bytes_per_s * 1e9)


def half_ring_s(pair: Transfer, size_bytes: int, ranks: int) -> float:
    """Reduce-scatter or all-gather: n-1 steps with a share of the bytes; a pair's all-reduce is two such."""
    step_s = (pair.latency_s + 2 * size_bytes / ranks / pair.bandwidth_bytes_per_s) / 2
    return (ranks - 1) * step_s


def all_reduce_ns(pair: Transfer, size_bytes: int, ranks: int) -> int:
    """Both one after the other."""
    return 0 if ranks == 1 else round(2 * half_ring_s(pair, size_bytes, ranks) * 1e9)
