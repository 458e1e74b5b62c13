"""The longest dependency path of 1F1B with messages, written down.

Stage i, from 0, has w_i = P-1-i warm-up forwards. Count its steady rounds so that its backward k is in round
k and its forward m in round m - w_i. Then a message forwards leads to the next round of the next stage, one
backwards stays in its round, and a stage's next op follows in the same or the next round. So a path is

    up      from the first forward of stage 0 to the first backward of a stage j, with w_j more forwards of
            the slowest stage up to j on the way, and back to a stage i
    rounds  M-2-w_i of them on stages from i on, each of which costs a forward and a backward somewhere
    down    from stage i to the last forward of a stage j', then back to stage 0, with w_j' more backwards of
            the slowest stage up to j' on the way

and every such path exists when M > P. With rendezvous, every forward and backward waits for its messages, so
messages are part of a stage's work and all rounds go to the stage where they are longest. With asynchronous
messages a path pays for a message only where it changes stages; so it gains by wandering, and its rounds are
spent on runs of neighbouring stages: the sum over the run plus twice its inner messages, in as many rounds as
the run has stages. ``prefix`` bounds partial candidates with the same paths.

That no run is shorter is proved by these paths. That they are the longest is empirical: tested against the
recurrences with messages no longer than any op. Longer ones queue, and may make a run longer still.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def rendezvous_ns(
    forward_ns: Sequence[int], backward_ns: Sequence[int], message_ns: Sequence[int], num_microbatches: int
) -> int:
    """Makespan of 1F1B with blocking messages in Megatron's default order, in O(P^2).

    Args:
        forward_ns: one microbatch's forward on each stage, length P.
        backward_ns: its backward.
        message_ns: one message over each link, length P-1.
        num_microbatches: M, more than P.

    Raises:
        ValueError: M <= P.
    """
    num_stages = len(forward_ns)
    _require_steady(num_stages, num_microbatches)
    ahead, behind = [*message_ns, 0], [0, *message_ns]
    work = [
        f + b + 2 * (after + before)
        for f, b, after, before in zip(forward_ns, backward_ns, ahead, behind, strict=True)
    ]
    steps = [after + before for after, before in zip(ahead, behind, strict=True)]
    # In a ramp each link carries one message at a time instead of two.
    below = [total - part for total, part in zip(accumulate(work), accumulate(behind), strict=True)]
    up, down = (
        [
            here + (num_stages - 1 - stage) * slowest
            for stage, (here, slowest) in enumerate(
                zip(below, accumulate(map(sum, zip(ops, steps, strict=True)), max), strict=True)
            )
        ]
        for ops in (forward_ns, backward_ns)
    )
    passed = [0, *accumulate(work)]
    return max(
        max(up[low:]) + max(down[low:]) - passed[low] + (num_microbatches - 1 - num_stages + low) * work[low]
        for low in range(num_stages)
    )


def asynchronous_ns(
    forward_ns: Sequence[int], backward_ns: Sequence[int], message_ns: Sequence[int], num_microbatches: int
) -> int:
    """Makespan of 1F1B with asynchronous messages, in O(M P^3). Arguments and errors as above."""
    num_stages = len(forward_ns)
    _require_steady(num_stages, num_microbatches)
    work = [f + b for f, b in zip(forward_ns, backward_ns, strict=True)]
    passed = [0, *accumulate(w + 2 * c for w, c in zip(work, [*message_ns, 0], strict=True))]
    up, down = (
        [
            passed[stage] + work[stage] + (num_stages - 1 - stage) * slowest
            for stage, slowest in enumerate(accumulate(ops, max))
        ]
        for ops in (forward_ns, backward_ns)
    )
    longest = 0
    for low in range(num_stages):
        runs = [0] * (num_stages - low + 1)
        for high in range(low, num_stages):
            # Longest runs of each length between the two.
            for first in range(low, high + 1):
                run = passed[high] + work[high] - passed[first]
                runs[high - first + 1] = max(runs[high - first + 1], run)
            rounds = _longest_rounds(runs[: high - low + 2], num_microbatches - 1 - num_stages + low)
            # One of the ramps must go as far as the rounds do.
            furthest = max(max(up[high:]) + max(down[low:]), max(up[low:]) + max(down[high:]))
            longest = max(longest, furthest - passed[low] + rounds)
    return longest


def _longest_rounds(runs: Sequence[int], num_rounds: int) -> int:
    """Most that ``num_rounds`` cost, spent on runs; ``runs[n]`` takes n rounds."""
    most = [0] * (num_rounds + 1)
    for spent in range(1, num_rounds + 1):
        lengths = range(1, min(spent, len(runs) - 1) + 1)
        most[spent] = max(most[spent - length] + runs[length] for length in lengths)
    return most[num_rounds]


def _require_steady(num_stages: int, num_microbatches: int) -> None:
    if num_microbatches <= num_stages:
        raise ValueError(
            f"the closed form needs more microbatches than stages, got {num_microbatches} for {num_stages}; "
            "use fast.makespans_ns"
        )
