"""Several sequences decoded at once: time per token, by playing forwards on random usage.

One process runs a forward of every sequence side by side, and rows at the same depth share the products there
(``runtime.decode.lockstep``). Each sequence decides for itself where its token leaves, so how many are still
there deeper down, and with how many rows, differs from forward to forward: their costs are not linear, and
an expected number of rows would not give the expected cost. So forwards are drawn and played, one after the
other; the costs are those of ``decode_process``, with what each further sequence adds.

In a pipeline every stage takes whatever rows have come in as one forward, and hands each token out where it
leaves; the process of the first stage feeds it again when it is back. That is played as events.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eeplan.sim.decode_process import DecodeProcess, Exit
from eeplan.spec import DecodeMode, HeadKind

FORWARDS = 4_000
"""Played; the mean's standard error is below 1 % then."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the rounds of ``self_speculative`` were like for a sequence, on average: drafts at an exit, all
    verified by the full model at once."""

    drafts: float
    """Drafted in a round."""
    tokens: float
    """Emitted by a round: the accepted drafts and one more."""


def batch_ns_per_token(
    process: DecodeProcess, mode: DecodeMode, shares: Sequence[float], limit: int, sequences: int
) -> float:
    """Time per token of all sequences together, prompts excluded.

    Args:
        process: built for ``mode``; without exits where none is checked.
        shares: of tokens that leave at each exit, the final one last.
        limit: most tokens of a sequence that may wait, in ``kv_recompute`` and ``catch_up``.
    """
    draws = np.random.default_rng(SEED)
    depths = np.array(process.depths)
    if mode == "pipeline":
        taken = draws.choice(depths, p=np.array(shares) / sum(shares), size=FORWARDS * sequences)
        return _Pipeline(process, taken.tolist(), sequences).run()
    taken = draws.choice(depths, p=np.array(shares) / sum(shares), size=(FORWARDS, sequences))
    batch = [_Waiting(keeps_depth=mode == "catch_up") for _ in range(sequences)]
    total_ns = 0
    for row in taken.tolist():
        joins = [one.joins(depth, limit, process.num_layers) for one, depth in zip(batch, row, strict=True)]
        total_ns += forward_ns(process, row, joins)
    return total_ns / taken.size


def speculative_batch_ns_per_token(
    process: DecodeProcess, exit_: Exit, rounds: Rounds, limit: int, sequences: int
) -> float:
    """The same of ``self_speculative``: each sequence drafts or verifies, whatever the others do.

    Args:
        exit_: that drafts.
        rounds: what rounds of a single sequence were like; rows draft with the chance that gives as many.
    """
    one_exit = [one for one in process.exits if one.depth == exit_.depth]
    drafts = np.random.default_rng(SEED).random((FORWARDS, sequences)) < _draft_chance(rounds.drafts, limit)
    waiting, passes, total_ns = [0] * sequences, 0, 0
    for row in drafts.tolist():
        depths = [
            exit_.depth if may and held < limit else process.num_layers
            for may, held in zip(row, waiting, strict=True)
        ]
        joins = [
            _Joins({exit_.depth: held} if depth == process.num_layers else {}, depth, held < limit, held + 1)
            for depth, held in zip(depths, waiting, strict=True)
        ]
        total_ns += forward_ns(process, depths, joins, one_exit)
        passes += sum(depth == process.num_layers for depth in depths)
        waiting = [
            held + 1 if depth < process.num_layers else 0 for depth, held in zip(depths, waiting, strict=True)
        ]
    return total_ns / (passes * rounds.tokens)


def _draft_chance(drafts: float, limit: int) -> float:
    """q with q + q^2 + .. + q^limit = drafts: the chance that a row that may draft does."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        if sum(middle**n for n in range(1, limit + 1)) < drafts:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class _Joins:
    """What one sequence's forward is made of."""

    rows_at: dict[int, int]
    """By depth: waiting rows that join there."""
    stop: int
    """Layers that the forward goes through."""
    checks: bool = True
    """Whether exits are asked, up to where the token leaves."""
    final_rows: int = 1
    """Rows that the final head reads, where the token gets there."""


@dataclass(slots=True)
class _Waiting:
    """Depths of one sequence's waiting tokens."""

    keeps_depth: bool
    depths: list[int] = field(default_factory=list)

    def joins(self, depth: int, limit: int, num_layers: int) -> _Joins:
        """The forward of a token that leaves at ``depth``; afterwards those wait whom it left waiting."""
        stop = num_layers if len(self.depths) >= limit else depth
        rows_at: dict[int, int] = {}
        for one in self.depths:
            if one < stop:
                rows_at[one] = rows_at.get(one, 0) + 1
        along = sum(rows_at.values()) + 1
        stay = [one for one in self.depths if one >= stop]
        self.depths = stay + ([stop if self.keeps_depth else 0] * along if stop < num_layers else [])
        return _Joins(rows_at, stop)


def forward_ns(
    process: DecodeProcess,
    depths: Sequence[int],
    joins: Sequence[_Joins],
    exits: Sequence[Exit] | None = None,
) -> int:
    """One forward of several sequences side by side.

    Args:
        depths: where each sequence's token leaves.
        exits: that are checked; default, all.
    """
    further = process.further
    total_ns = process.step_overhead_ns + (len(depths) - 1) * further.step_ns
    rows = [1 + one.rows_at.get(0, 0) for one in joins]
    total_ns += process.embedding.at(sum(rows))
    depth = 0
    for exit_ in (*(process.exits if exits is None else exits), None):
        stop = process.num_layers if exit_ is None else exit_.depth
        here = [index for index, one in enumerate(joins) if one.stop > depth]
        if not here:
            return total_ns
        if depth:
            for index in here:
                rows[index] += joins[index].rows_at.get(depth, 0)
        count = sum(rows[index] for index in here)
        total_ns += (stop - depth) * layer_ns(process, [rows[index] for index in here])
        depth = stop
        if exit_ is None:
            continue
        if exit_.head == "block":
            total_ns += check_ns(process, exit_.head, count, len(here))
        else:
            asked = sum(depths[index] >= depth and joins[index].checks for index in here)
            total_ns += check_ns(process, exit_.head, asked, asked)
    ends = [one for one, at in zip(joins, depths, strict=True) if at == process.num_layers]
    if ends:
        read = sum(one.final_rows for one in ends)
        total_ns += process.final_head.at(read) + (read - 1) * further.final_head_ns
    return total_ns


def layer_ns(process: DecodeProcess, rows: Sequence[int]) -> int:
    """One layer on so many rows of each sequence."""
    further = process.further
    each_ns = [further.layer_ns if count == 1 else further.masked_layer_ns for count in rows]
    # What one sequence takes for itself is in the cost of the rows.
    return process.layer.at(sum(rows)) + sum(each_ns) - max(each_ns)


def check_ns(process: DecodeProcess, kind: HeadKind, rows: int, sequences: int) -> int:
    """An exit's check on so many rows of so many sequences; nothing on none."""
    if not rows:
        return 0
    return process.heads[kind].at(rows) + (sequences - 1) * process.further.heads_ns.get(kind, 0)


class _Pipeline:
    """Stages that each run what has come in, as one forward; a token goes back when it is emitted."""

    def __init__(self, process: DecodeProcess, depths: Sequence[int], sequences: int) -> None:
        self.process, self.depths = process, depths
        self.ends = np.cumsum(process.layers_per_stage).tolist()
        self.queues: list[list[int]] = [[] for _ in process.layers_per_stage]
        self.busy = [False] * len(self.queues)
        self.events: list[tuple[int, int, int, tuple[int, ...]]] = []
        """Time, a number that orders equal times, the stage, and the tokens that arrive; none: it is free."""
        self.numbers = 0
        self.sequence_of = list(range(sequences))
        """By token, in the order of their starts."""
        self._at(0, 0, tuple(range(sequences)))

    def run(self) -> float:
        """Nanoseconds per token."""
        now_ns = 0
        while self.events:
            now_ns, _, stage, tokens = heapq.heappop(self.events)
            if tokens:
                self.queues[stage] += tokens
            else:
                self.busy[stage] = False
            # What else happens at this very moment comes first.
            if self.queues[stage] and not self.busy[stage]:
                self._forward(now_ns, stage)
        return now_ns / len(self.depths)

    def _at(self, time_ns: int, stage: int, tokens: tuple[int, ...]) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (time_ns, self.numbers, stage, tokens))

    def _forward(self, now_ns: int, stage: int) -> None:
        """Run what is queued; emissions go back when they happen, rows go on at the end."""
        process, tokens = self.process, tuple(self.queues[stage])
        self.queues[stage] = []
        self.busy[stage] = True
        further, count = process.further, len(tokens)
        held = Counter(self.sequence_of[token] for token in tokens)
        per_layer_ns = layer_ns(process, list(held.values()))
        now_ns += process.step_overhead_ns + (len(held) - 1) * further.step_ns
        depth = self.ends[stage] - process.layers_per_stage[stage]
        now_ns += process.embedding.at(count) if stage == 0 else 0
        for exit_ in (one for one in process.exits if one.stage == stage):
            now_ns += (exit_.depth - depth) * per_layer_ns
            depth = exit_.depth
            asked = sum(self.depths[token] >= depth for token in tokens)
            reads = count if exit_.head == "block" else asked
            now_ns += check_ns(process, exit_.head, reads, reads)
            self._emit(now_ns, stage, [token for token in tokens if self.depths[token] == depth])
        now_ns += (self.ends[stage] - depth) * per_layer_ns
        if stage + 1 < len(self.queues):
            self._at(now_ns + process.message_ns, stage + 1, tokens)
        elif ends := [token for token in tokens if self.depths[token] == process.num_layers]:
            now_ns += process.final_head.at(len(ends)) + (len(ends) - 1) * further.final_head_ns
            self._emit(now_ns, stage, ends)
        self._at(now_ns, stage, ())

    def _emit(self, now_ns: int, stage: int, tokens: Sequence[int]) -> None:
        """Each makes room for its sequence's next token."""
        first = len(self.sequence_of)
        following = range(first, min(first + len(tokens), len(self.depths)))
        self.sequence_of += [self.sequence_of[token] for token in tokens[: len(following)]]
        if following:
            self._at(now_ns + (self.process.return_ns if stage else 0), 0, tuple(following))
