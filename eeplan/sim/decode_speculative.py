"""Expected time per token of self-speculative decoding, from what its rounds were like.

A round drafts n tokens at an exit after d of L layers and verifies them: n + 1 steps of one row through the
first d layers, a head check on each that may still draft, then n + 1 rows through the other L - d layers and
the final head at once. It emits the accepted drafts and one token more. With n the mean over rounds (costs
by rows are close to linear between neighbours) and h checks in a round,

    T = (n + 1) (o + E(1) + d l(1)) + h e(1) + (L - d) l(n + 1) + F(n + 1),

o what the loop spends on a step, E embedding, l a layer, e the exit's head, F the final head; per token that
is T over the tokens that a round emits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eeplan.sim.decode_process import DecodeProcess, RowCosts


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the rounds of a generation were like, on average."""

    drafts: float
    """Drafted in a round (n)."""
    checks: float
    """Exit heads computed in a round (h)."""
    tokens: float
    """Emitted by a round."""


def expected_speculative_ns(process: DecodeProcess, depth: int, rounds: Rounds) -> float:
    """Nanoseconds per emitted token.

    Args:
        process: on one process, of the model with its exits.
        depth: of the exit that drafts.
    """
    exit_ = next(one for one in process.exits if one.depth == depth)
    rows = rounds.drafts + 1.0
    step_ns = process.step_overhead_ns + process.embedding.at(1) + depth * process.layer.at(1)
    verify_ns = (process.num_layers - depth) * _at(process.layer, rows) + _at(process.final_head, rows)
    round_ns = rows * step_ns + rounds.checks * process.heads[exit_.head].at(1) + verify_ns
    return round_ns / rounds.tokens


def _at(costs: RowCosts, rows: float) -> float:
    """Linear between whole numbers of rows."""
    below = math.floor(rows)
    low, high = costs.at(below), costs.at(below + 1)
    return low + (high - low) * (rows - below)
