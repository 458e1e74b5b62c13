"""Expected latency per token of the decoding modes, from costs by number of rows and exit usage.

One sequence, greedy rule: a token leaves at the first exit that is confident enough (EE-LLM 4). Tokens are
taken as independent: each leaves at exit j = 1..k with probability q_j, and goes through all layers with
q_final. Let p = 1 - q_final and R the limit of tokens that may wait.

**Waiting tokens.** In ``kv_recompute`` and ``catch_up`` a token that leaves early waits until a forward goes
through all layers: because the current token does, or because R tokens wait. So the number n of waiting
tokens is a Markov chain on 0..R that goes from n to n + 1 with probability p if n < R, and to 0 otherwise.
Each of its cycles starts at 0 and visits n if the first n tokens left early: the stationary distribution is

    pi_n = p^n / (1 + p + ... + p^R).

What the current token does is independent of n; a step's expected time is the sum over both.

**kv_recompute** runs all n + 1 rows from the first layer on, up to where the current token leaves, or through
all layers if forced (n = R).

**catch_up** keeps the hidden state of each waiting token where it left. Between exits m and m + 1 the forward
takes along those that wait at exit m or before. They are the latest ones: a token that went further took all
of them along. So their number a is the length of the run of tokens, back from the current one, that left at
exit m or before. Each of the n waiting tokens did with probability s_m = (q_1 + .. + q_m) / p, independently:
P(a | n) = s^a (1 - s) for a < n, and s^n for a = n. Summation by parts gives for any cost C of a + 1 rows

    E[C(a + 1) | n] = C(1) + sum_{i=1..n} s^i (C(i + 1) - C(i)).

Since a <= n and costs do not fall with rows, catch_up is never slower than kv_recompute.

**pipeline** is in ``decode_pipeline``. **full** checks no exit, and neither do the others at threshold 1. An
exit check costs a head on one row, whether the token leaves there or not. A ``block`` head attends, so it
runs on all rows that pass it, also when the token is emitted already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eeplan.profile import OpProfile
from eeplan.sim.decode_pipeline import expected_pipeline_ns
from eeplan.sim.decode_process import DecodeProcess, ExitPoint, RowCosts, decode_process
from eeplan.sim.layout import Layout
from eeplan.spec import DecodeMode, HeadKind
from eeplan.usage import ExitShares

Floats = NDArray[np.float64]

ONE_PER_ROW = RowCosts((1, 2), (1, 2))


@dataclass(frozen=True, slots=True)
class Latency:
    """Expected cost of one token of a long generation, prompt excluded."""

    mode: DecodeMode
    processes: int
    ns_per_token: float
    full_ns_per_token: float
    """The same model without early exits on one process."""
    layer_rows_per_token: float
    """Layers run, each counted once per row."""
    checks_per_token: float
    """Early heads run, each counted once per row."""
    mean_depth: float
    """Layers that the emitting exits read."""

    @property
    def speed_up(self) -> float:
        """Over ``full``, which is 1."""
        return self.full_ns_per_token / self.ns_per_token


def decode_prediction(
    profile: OpProfile,
    layout: Layout,
    exits: Sequence[ExitPoint],
    usage: ExitShares,
    mode: DecodeMode,
    recompute_limit: int,
) -> Latency:
    """Predict one decoding mode.

    Args:
        profile: with decode costs.
        layout: its stages count in mode ``pipeline`` only.
        exits: of the model; ``usage`` has one share for each, by depth.
        recompute_limit: R of ``kv_recompute`` and ``catch_up``.

    Raises:
        ProfileError: the profile has no decode costs, or lacks one of an exit's head kind.
    """
    process = decode_process(profile, layout, exits, mode)
    alone = process if mode != "pipeline" else decode_process(profile, layout, (), "full")
    return expected_latency(process, usage, mode, recompute_limit, full_ns=alone.full_ns)


def expected_latency(
    process: DecodeProcess, usage: ExitShares, mode: DecodeMode, recompute_limit: int, full_ns: int
) -> Latency:
    """Expected cost of one token, by the formulas of this module.

    Args:
        process: built for ``mode``.
        usage: shares of tokens by exit, in the process's order.
        full_ns: what one token takes in mode ``full``.
    """
    assert (*usage.depths, usage.num_layers) == process.depths, "shares and exits belong together"
    if usage.threshold >= 1.0:
        process, usage = replace(process, exits=()), replace(usage, depths=(), early=())
    if mode == "full":
        ns, layer_rows, checks = float(full_ns), float(process.num_layers), 0.0
    elif mode == "pipeline":
        ns, layer_rows = expected_pipeline_ns(process, usage.all), float(process.num_layers)
        checks = _checks_in_pipeline(process, usage)
    else:
        ns, layer_rows, checks = (
            _expected_step(counted, usage, mode, recompute_limit)
            for counted in (process, _layer_rows(process), _check_rows(process))
        )
    return Latency(
        mode=mode,
        processes=len(process.layers_per_stage),
        ns_per_token=ns,
        full_ns_per_token=float(full_ns),
        layer_rows_per_token=layer_rows,
        checks_per_token=checks,
        mean_depth=float(process.num_layers) if mode == "full" else usage.mean_depth,
    )


def waiting_distribution(early: float, limit: int) -> Floats:
    """pi_0 .. pi_R: how many tokens wait when a step starts.

    Args:
        early: probability p that a token leaves early.
        limit: R.
    """
    powers = early ** np.arange(limit + 1)
    return np.asarray(powers / powers.sum(), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Expected time of the parts of a step in ``kv_recompute`` or ``catch_up``, in nanoseconds.

    A step is cut at the exits. Segment m is the layers between exit m (0: the first layer) and exit m + 1,
    with that exit's check. What it costs depends on the model's other exits only through ``early``, the share
    p of tokens that leave at any of them, and ``left``, the share that left at exit m or before.
    """

    process: DecodeProcess
    mode: DecodeMode
    early: float
    waiting: Floats
    """Distribution of the number of waiting tokens, 0..R."""

    @property
    def fixed_ns(self) -> float:
        """Once per step: the loop itself and the embedding."""
        embedding = self.process.embedding
        rows = self._all_rows(embedding) if self.mode == "kv_recompute" else embedding.at(1)
        return float(self.process.step_overhead_ns + (self.waiting * rows).sum())

    def layer_ns(self, left: float) -> float:
        """One layer of the segment."""
        return float((self._passes(left) * self._rows(self.process.layer, left)).sum())

    def check_ns(self, left: float, kind: HeadKind) -> float:
        """The check at its end."""
        head = self.process.heads[kind]
        if kind == "block":
            return float((self._passes(left) * self._rows(head, left)).sum())
        return (1.0 - left) * head.at(1)

    def final_ns(self, left: float) -> float:
        """The final head, after the last segment."""
        return (1.0 - left) * self.process.final_head.at(1)

    def _passes(self, left: float) -> Floats:
        """Probability of n waiting tokens and a forward that enters the segment."""
        passes = self.waiting * (1.0 - left)
        # A forced forward passes whether the current token is emitted already or not.
        passes[-1] = self.waiting[-1]
        return passes

    def _rows(self, costs: RowCosts, left: float) -> Floats:
        """Expected cost on the rows that run through the segment, given n = 0..R waiting tokens."""
        table = self._all_rows(costs)
        if self.mode == "kv_recompute":
            return table
        share = min(1.0, left / self.early) if self.early > 0.0 else 0.0
        steps = share ** np.arange(1, len(table)) * np.diff(table)
        return np.asarray(table[0] + np.concatenate(([0.0], np.cumsum(steps))), dtype=np.float64)

    def _all_rows(self, costs: RowCosts) -> Floats:
        """Cost with all n = 0..R waiting tokens along."""
        return np.array(costs.table(len(self.waiting)), dtype=np.float64)


def step_costs(process: DecodeProcess, mode: DecodeMode, early: float, limit: int) -> StepCosts:
    """Costs of a step when the share ``early`` of tokens leaves early and at most ``limit`` may wait."""
    return StepCosts(process, mode, early, waiting_distribution(early, limit))


def _expected_step(process: DecodeProcess, usage: ExitShares, mode: DecodeMode, limit: int) -> float:
    costs = step_costs(process, mode, 1.0 - usage.final, limit)
    total, left, depth = costs.fixed_ns, 0.0, 0
    for exit_, share in zip(process.exits, usage.early, strict=True):
        total += (exit_.depth - depth) * costs.layer_ns(left) + costs.check_ns(left, exit_.head)
        left, depth = min(1.0, left + share), exit_.depth
    return total + (process.num_layers - depth) * costs.layer_ns(left) + costs.final_ns(left)


def _layer_rows(process: DecodeProcess) -> DecodeProcess:
    """The same process in which a layer costs its rows and nothing else costs anything."""
    free = RowCosts((1,), (0,))
    return replace(
        process,
        layer=ONE_PER_ROW,
        embedding=free,
        final_head=free,
        heads=dict.fromkeys(process.heads, free),
        step_overhead_ns=0,
    )


def _check_rows(process: DecodeProcess) -> DecodeProcess:
    """The same process in which an exit check costs its rows and nothing else costs anything."""
    bare = _layer_rows(process)
    return replace(bare, layer=RowCosts((1,), (0,)), heads=dict.fromkeys(process.heads, ONE_PER_ROW))


def _checks_in_pipeline(process: DecodeProcess, usage: ExitShares) -> float:
    arrives = 1.0 - np.cumsum((0.0, *usage.early))[:-1]
    return sum(
        1.0 if exit_.head == "block" else float(share)
        for exit_, share in zip(process.exits, arrives, strict=True)
    )
