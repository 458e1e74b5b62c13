"""Filled 1F1B from its definition: orders, the longest path through them, and bytes counted one by one.

Shares no code with the schedule, its passes or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oracles.longest_path import Node, longest


@dataclass(frozen=True)
class NaiveFill:
    """One iteration: full microbatches, warm-up inserts by depth, truncated microbatches by reach."""

    num_stages: int
    num_full: int
    depths: Sequence[int]
    reaches: Sequence[int]

    @property
    def through(self) -> list[str]:
        """Names of the microbatches that pass all stages forward."""
        return [f"full{i}" for i in range(self.num_full)] + [f"cut{i}" for i in range(len(self.reaches))]

    def goes_back(self, name: str, stage: int) -> bool:
        """Whether the stage runs the backward of a full or truncated microbatch."""
        return name.startswith("full") or stage >= self.num_stages - self.reaches[int(name[3:])]

    def inserts(self, stage: int) -> list[str]:
        """Warm-up inserts on a stage, in forward order."""
        return [f"insert{i}" for i, depth in enumerate(self.depths) if depth > stage]

    def order(self, stage: int) -> list[tuple[str, str]]:
        """(F or B, microbatch) as the stage runs them: back as soon as P - stage are under way."""
        names, order = self.through, []
        forwards = backwards = 0
        while backwards < len(names):
            if forwards < len(names) and forwards - backwards < self.num_stages - stage:
                order.append(("F", names[forwards]))
                forwards += 1
            else:
                order.append(("B", names[backwards]))
                backwards += 1
        first = order.index(("B", names[0]))
        hosted = self.inserts(stage)
        order[first:first] = [("F", n) for n in hosted] + [("B", n) for n in reversed(hosted)]
        return [o for o in order if o[0] == "F" or o[1].startswith("insert") or self.goes_back(o[1], stage)]

    def turns(self, name: str, stage: int) -> bool:
        """Whether an insert ends on the stage."""
        return name.startswith("insert") and self.depths[int(name[6:])] == stage + 1

    def microbatch(self, name: str) -> int:
        """The number that the schedule gives it."""
        names = [*self.through, *(f"insert{i}" for i in range(len(self.depths)))]
        return names.index(name)


def filled_ns(
    fill: NaiveFill,
    duration_ns: dict[tuple[str, str], Sequence[int]],
    message_ns: Sequence[int],
) -> dict[tuple[str, int, int], int]:
    """End of every op (F or B, stage, microbatch) with asynchronous messages.

    Args:
        duration_ns: per stage, by (F or B, "whole" | "turn" | "bare").
        message_ns: per link.
    """
    durations: dict[Node, int] = {}
    after: dict[Node, list[Node]] = {}
    orders = [fill.order(stage) for stage in range(fill.num_stages)]
    for stage, order in enumerate(orders):
        previous: list[Node] = []
        for kind, name in order:
            neighbour = stage - 1 if kind == "F" else stage + 1
            inputs: list[Node] = [("F", stage, name)] if kind == "B" else []
            if 0 <= neighbour < fill.num_stages and (kind, name) in orders[neighbour]:
                inputs.append(("message", kind, neighbour, name))
            part = "whole"
            if fill.turns(name, stage):
                part = "turn"
            elif kind == "F" and not name.startswith("insert") and not fill.goes_back(name, stage):
                part = "bare"
            durations[kind, stage, name] = duration_ns[kind, part][stage]
            after[kind, stage, name] = previous + inputs
            previous = [(kind, stage, name)]
    for sender in range(fill.num_stages):
        for kind, receiver in (("F", sender + 1), ("B", sender - 1)):
            if 0 <= receiver < fill.num_stages:
                _add_messages(fill, orders, sender, receiver, kind, message_ns, durations, after)
    ends = longest(durations, after)
    return {(node[0], node[1], fill.microbatch(node[2])): end for node, end in ends.items() if len(node) == 3}


def _add_messages(
    fill: NaiveFill,
    orders: list[list[tuple[str, str]]],
    sender: int,
    receiver: int,
    kind: str,
    message_ns: Sequence[int],
    durations: dict[Node, int],
    after: dict[Node, list[Node]],
) -> None:
    """Messages of one channel, in the order in which the receiver uses them."""
    produced = [name for k, name in orders[sender] if k == kind]
    queue: list[Node] = []
    for k, name in orders[receiver]:
        if k != kind or name not in produced:
            continue
        node = ("message", kind, sender, name)
        durations[node] = message_ns[min(sender, receiver)]
        after[node] = [(kind, sender, name), *queue]
        first_back = orders[receiver].index(("B", "full0"))
        late = orders[receiver].index((k, name)) > first_back
        early = orders[sender].index((k, name)) < orders[sender].index(("B", "full0"))
        if kind == "F" and late and early and fill.inserts(sender):
            # Sent after the inserts, because the receiver uses it after its own first backward.
            after[node].append(("B", sender, fill.inserts(sender)[0]))
        queue = [node]


def peak_bytes(
    fill: NaiveFill, stage: int, kept: int, turn_kept: int, forward_extra: int, backward_extra: int
) -> int:
    """Most live bytes of a stage, walking its ops in order."""
    live = peak = 0
    for kind, name in fill.order(stage):
        mine = turn_kept if fill.turns(name, stage) else kept
        if kind == "F":
            peak = max(peak, live + mine + forward_extra)
            live += mine * (name.startswith("insert") or fill.goes_back(name, stage))
        else:
            peak = max(peak, live + backward_extra)
            live -= mine
    assert live == 0, f"{live} bytes leaked on stage {stage}"
    return peak
