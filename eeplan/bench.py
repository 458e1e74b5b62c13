"""How fast eeplan's own parts are, measured here and now. Prints nothing; the command line does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.fast import closed_form_makespans_ns, makespans_ns
from eeplan.sim.schedule import one_f_one_b

SIZES = ((4, 64), (8, 128), (64, 1024))
"""(P, M) of the comparison with other simulators (facts 8)."""

REPEATS = 5
MIN_SECONDS = 0.02
"""A measurement shorter than this is repeated within one reading of the clock."""


def bench_sim(
    sizes: Sequence[tuple[int, int]] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Evaluations per second of each way to get a makespan, in one process and one thread.

    Candidates are random around f=1, b=2, c=0.01 ms, all different. The closed form, the recurrence and the
    rendezvous recurrence judge a batch of them; the engine makes one schedule and its whole timeline with
    spans, messages and memory. Each number is the best of ``REPEATS``, after one run to load or compile.

    Args:
        sizes: (P, M) of each case.
        clock: seconds, ever growing.

    Returns:
        ``{"cases": [{"evaluator", "p", "m", "configs_per_s"}, …]}``
    """
    cases = []
    for num_stages, num_microbatches in sizes:
        for evaluator, evaluate, num_configs in _evaluators(num_stages, num_microbatches):
            seconds = _best_seconds(evaluate, clock)
            cases.append(
                {
                    "evaluator": evaluator,
                    "p": num_stages,
                    "m": num_microbatches,
                    "configs_per_s": num_configs / seconds,
                }
            )
    return {"cases": cases}


def _evaluators(num_stages: int, num_microbatches: int) -> list[tuple[str, Callable[[], object], int]]:
    """Name, what to run, and how many candidates one run judges."""
    ops = num_stages * num_microbatches
    num_candidates = max(256, 8_000_000 // ops // 32 * 32)
    generator = np.random.default_rng(0)
    shape = (num_candidates, num_stages)
    forward = generator.integers(900_000, 1_100_000, shape)
    backward = generator.integers(1_800_000, 2_200_000, shape)
    messages = np.full(num_stages - 1, 10_000)
    costs = PipelineCosts(
        forward_ns=tuple(forward[0].tolist()),
        backward_ns=tuple(backward[0].tolist()),
        message_ns=tuple(messages.tolist()),
        static_bytes=(10**9,) * num_stages,
        kept_bytes=(10**8,) * num_stages,
        forward_transient_bytes=(10**7,) * num_stages,
        backward_transient_bytes=(10**7,) * num_stages,
    )
    batch = forward, backward, num_microbatches
    return [
        ("closed_form", lambda: closed_form_makespans_ns(*batch), num_candidates),
        ("recurrence", lambda: makespans_ns(*batch, messages, "asynchronous"), num_candidates),
        ("rendezvous", lambda: makespans_ns(*batch, messages, "rendezvous"), num_candidates),
        ("engine", lambda: simulate(one_f_one_b(num_stages, num_microbatches), costs), 1),
    ]


def _best_seconds(evaluate: Callable[[], object], clock: Callable[[], float]) -> float:
    evaluate()
    best = float("inf")
    for _ in range(REPEATS):
        runs = 0
        start = clock()
        while (elapsed := clock() - start) < MIN_SECONDS or not runs:
            evaluate()
            runs += 1
        best = min(best, elapsed / runs)
    return best
