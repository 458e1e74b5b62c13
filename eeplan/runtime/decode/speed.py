"""Times greedy decoding on prompts.

Contenders are timed in rounds. Every round gives all of them the same prompts, one after the other, in an
order that rotates, so that whatever else the machine does meets all alike; ratios are within a round. All
generate the same number of tokens and stop at none.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eeplan.console import Progress
from eeplan.decode_speed import Contender, Threshold, Timing, median_ratio
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.modes import MODES, LocalMode, Mode
from eeplan.runtime.decode.options import GenerateOptions, generate_options
from eeplan.runtime.decode.policy import ConfidenceKind
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.model import EarlyExitGPT

Prompts = Sequence[Sequence[int]]
TOGETHER = 7
"""Thresholds that share a run of ``full`` in every round; with more, it is too long ago for the last."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a contender."""

    times: Sequence[Sequence[float]]
    """For each sequence when each of its tokens was there, in seconds from the prompts on."""
    exits: Mapping[str, int] = field(default_factory=dict)
    """Tokens by exit, the first of each sequence left out."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders share."""

    vocab_size: int
    new_tokens: int
    recompute_limit: int
    confidence: ConfidenceKind

    def options(self, mode: Mode, threshold: Threshold) -> GenerateOptions:
        """Greedy decoding in a mode."""
        return generate_options(
            threshold=threshold,
            max_new_tokens=self.new_tokens,
            mode=mode,
            confidence=self.confidence,
            recompute_limit=self.recompute_limit,
        )


def time_all(
    model: EarlyExitGPT,
    contenders: Sequence[Contender],
    prompts: Prompts,
    setting: Setting,
    *,
    rounds: int,
    others: Sequence[tuple[Contender, Callable[[Prompts], Ran]]] = (),
    between: Callable[[], None] = lambda: None,
    progress: Progress,
) -> dict[Contender, Timing]:
    """Time every contender on every round's prompts.

    Args:
        contenders: decoded on this process.
        prompts: of one length, as many as ``rounds`` times the largest batch.
        others: with a function that decodes prompts.
        between: run in every round after the contenders.
    """
    runs: list[tuple[Contender, Callable[[Prompts], Ran]]] = [
        *((one, _local(model, one, setting)) for one in contenders),
        *others,
    ]
    timings = {contender: Timing() for contender, _ in runs}
    largest = max(contender.batch for contender, _ in runs)
    for contender, run in runs:
        # Untimed: allocations, and code that runs for the first time.
        run(prompts[: contender.batch])
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            progress.update(index, rounds, "rounds")
            given = prompts[index * largest : (index + 1) * largest]
            turn = index % len(runs)
            for contender, run in runs[turn:] + runs[:turn]:
                _add(timings[contender], run(given[: contender.batch]))
            between()
            gc.collect()
    finally:
        gc.enable()
    return timings


def engine_run(engine: Engine, prompts: Prompts, options: GenerateOptions) -> Ran:
    """Decode prompts side by side."""
    times: dict[int, list[float]] = {}
    exits: Counter[str] = Counter()
    start_s = time.perf_counter()
    for prompt in prompts:
        times[engine.submit(Request(tuple(prompt), options))] = []
    while engine.running or engine.waiting:
        events = engine.step()
        now_s = time.perf_counter() - start_s
        for event in events:
            if event.emission is not None and times[event.request]:
                exits[event.emission.exit] += 1
            times[event.request].append(now_s)
    return Ran(list(times.values()), exits)


def threshold_speeds(
    model: EarlyExitGPT,
    mode: LocalMode,
    thresholds: Sequence[float],
    prompts: Prompts,
    setting: Setting,
    progress: Progress,
) -> list[dict[str, Any]]:
    """How fast a mode decodes one sequence at each threshold, beside ``full`` on the same prompts.

    Args:
        prompts: of one length; each is a round.

    Returns:
        For each threshold ``mode``; ``tokens_per_s``, median over rounds, after the first token; ``speed_up``
        over ``full``, median of the ratios within rounds.
    """
    full = Contender("full", 1)
    found = []
    for start in range(0, len(thresholds), TOGETHER):
        wanted = [Contender(mode, 1, threshold) for threshold in thresholds[start : start + TOGETHER]]
        timings = time_all(model, [full, *wanted], prompts, setting, rounds=len(prompts), progress=progress)
        base_s = timings[full].token_s
        found += [
            {
                "mode": mode,
                "tokens_per_s": 1.0 / statistics.median(timings[one].token_s),
                "speed_up": median_ratio(timings[one].token_s, base_s),
            }
            for one in wanted
        ]
    return found


def _local(model: EarlyExitGPT, contender: Contender, setting: Setting) -> Callable[[Prompts], Ran]:
    mode = next(one for one in MODES if one == contender.mode)
    options = setting.options(mode, contender.threshold)
    engine = LocalEngine(model, vocab_size=setting.vocab_size, max_running=contender.batch)
    return lambda prompts: engine_run(engine, prompts, options)


def _add(timing: Timing, ran: Ran) -> None:
    """Take in one run."""
    times = ran.times
    first_s, last_s = max(one[0] for one in times), max(one[-1] for one in times)
    timing.first_s.append(first_s)
    later = sum(sum(at > first_s for at in one) for one in times)
    timing.token_s.append((last_s - first_s) / max(1, later))
    for one in times:
        timing.latencies_s += _latencies(one)
    timing.exits.update(ran.exits)


def _latencies(times: Sequence[float]) -> list[float]:
    """Time since the token before; tokens of one moment share it evenly."""
    found: list[float] = []
    before_s, together = times[0], 0
    for index, at_s in enumerate(times[1:], start=1):
        together += 1
        if index + 1 == len(times) or times[index + 1] != at_s:
            found += [(at_s - before_s) / together] * together
            before_s, together = at_s, 0
    return found
