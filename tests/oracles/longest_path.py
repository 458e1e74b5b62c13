"""Makespan of 1F1B as the longest path through an explicitly built graph. Slow, and free of any clock.

Nodes are ops and messages with a duration; edges say "not before". Written from the definition of 1F1B alone,
so it shares no code with the schedule or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Node = tuple[Any, ...]


def one_f_one_b_ns(
    forward_ns: Sequence[int],
    backward_ns: Sequence[int],
    num_microbatches: int,
    message_ns: Sequence[int] = (),
) -> int:
    """Makespan with asynchronous messages.

    Args:
        forward_ns: per stage, length P.
        backward_ns: per stage, length P.
        num_microbatches: M.
        message_ns: per link, length P-1; empty for free messages. A link carries one message per direction.
    """
    num_stages = len(forward_ns)
    durations: dict[Node, int] = {}
    after: dict[Node, list[Node]] = {}

    def add(node: Node, duration: int, *befores: Node) -> None:
        durations[node] = duration
        after[node] = list(befores)

    for stage in range(num_stages):
        previous: list[Node] = []
        for kind, m in _order(num_stages, stage, num_microbatches):
            neighbour = stage - 1 if kind == "F" else stage + 1
            inputs = [("message", kind, neighbour, m)] if 0 <= neighbour < num_stages else []
            if kind == "B":
                inputs.append(("F", stage, m))
            add((kind, stage, m), (forward_ns if kind == "F" else backward_ns)[stage], *previous, *inputs)
            previous = [(kind, stage, m)]
    for stage in range(num_stages):
        for m in range(num_microbatches):
            for kind, link in (("F", stage), ("B", stage - 1)):
                if 0 <= link < num_stages - 1:
                    in_the_way = [("message", kind, stage, m - 1)] if m else []
                    duration = message_ns[link] if message_ns else 0
                    add(("message", kind, stage, m), duration, (kind, stage, m), *in_the_way)
    return max(longest(durations, after).values())


def blocking_one_f_one_b_ns(
    forward_ns: Sequence[int], backward_ns: Sequence[int], num_microbatches: int, message_ns: Sequence[int]
) -> int:
    """Makespan with rendezvous messages, by the phases of Megatron's 1F1B without interleaving.

    A message is one node on the programs of both of its stages, so it starts when both have come to it.
    """
    num_stages = len(forward_ns)
    durations: dict[Node, int] = {}
    after: dict[Node, list[Node]] = {}
    for stage in range(num_stages):
        previous: list[Node] = []
        for node in _megatron_program(num_stages, stage, num_microbatches):
            kind, where, _ = node
            if kind in ("F", "B"):
                durations[node] = (forward_ns if kind == "F" else backward_ns)[where]
            else:
                durations[node] = message_ns[where]
            after.setdefault(node, []).extend(previous)
            previous = [node]
    return max(longest(durations, after).values())


def _megatron_program(num_stages: int, stage: int, num_microbatches: int) -> list[Node]:
    """Nodes (F or B, stage, m) and (hidden or gradient, link, m) that a stage passes one after the other."""
    program: list[Node] = []

    def message(kind: str, link: int, m: int) -> None:
        if 0 <= link < num_stages - 1:
            program.append((kind, link, m))

    warm_up = min(num_stages - stage - 1, num_microbatches)
    remaining = num_microbatches - warm_up
    for m in range(warm_up):
        message("hidden", stage - 1, m)
        program.append(("F", stage, m))
        message("hidden", stage, m)
    if remaining:
        message("hidden", stage - 1, warm_up)
    for m in range(remaining):
        program.append(("F", stage, warm_up + m))
        message("hidden", stage, warm_up + m)
        message("gradient", stage, m)
        program.append(("B", stage, m))
        if m < remaining - 1:
            message("hidden", stage - 1, warm_up + m + 1)
        message("gradient", stage - 1, m)
    for m in range(remaining, num_microbatches):
        message("gradient", stage, m)
        program.append(("B", stage, m))
        message("gradient", stage - 1, m)
    return program


def _order(num_stages: int, stage: int, num_microbatches: int) -> list[tuple[str, int]]:
    """1F1B by its rule: go backward as soon as P - stage microbatches are held, or no forward is left."""
    order: list[tuple[str, int]] = []
    forwards = backwards = 0
    while backwards < num_microbatches:
        if forwards < num_microbatches and forwards - backwards < num_stages - stage:
            order.append(("F", forwards))
            forwards += 1
        else:
            order.append(("B", backwards))
            backwards += 1
    return order


def longest(durations: dict[Node, int], after: dict[Node, list[Node]]) -> dict[Node, int]:
    """End of every node when each starts once all that it comes after have ended."""
    ends: dict[Node, int] = {}
    for root in durations:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [before for before in after[node] if before not in ends]
            if missing:
                stack += missing
                continue
            stack.pop()
            ends[node] = max((ends[before] for before in after[node]), default=0) + durations[node]
    return ends
