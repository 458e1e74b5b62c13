"""Times the decoding modes on a checkpoint: the part of ``eeplan bench decode`` that needs torch.

Contenders are timed in rounds. Every round gives all of them the same prompts, one after the other, in an
order that rotates, so that whatever else the machine does meets all alike; ratios are within a round. All
generate the same number of tokens and stop at none.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eeplan.bench_decode import Contender, Counts, Threshold, Timing
from eeplan.console import Progress
from eeplan.runtime.benches import llama as hf
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.modes import MODES, Mode, make_decoder
from eeplan.runtime.decode.options import GenerateOptions, generate_options
from eeplan.runtime.decode.policy import ConfidenceKind
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.decode.speculative import SpeculativeDecoder
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.stage import FINAL, exit_name
from eeplan.sim.decode_batch import Rounds

Prompts = Sequence[Sequence[int]]


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


def pipeline_runs(
    engine: Engine, threshold: Threshold, threads: int, setting: Setting
) -> Callable[[Prompts], Ran]:
    """:func:`engine_run` of pipeline stages.

    Args:
        threads: of this process, which runs the first stage; it has others for what else it times.
    """
    options = setting.options("pipeline", threshold)

    def run(prompts: Prompts) -> Ran:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return engine_run(engine, prompts, options)
        finally:
            torch.set_num_threads(before)

    return run


def transformers_runs(llama: Any, setting: Setting) -> Callable[[Prompts], Ran]:
    """:func:`engine_run` of the equal model in ``transformers``."""

    def run(prompts: Prompts) -> Ran:
        return Ran([hf.generate_times(llama, prompts, setting.new_tokens)] * len(prompts))

    return run


def count(
    model: EarlyExitGPT, mode: Mode, threshold: Threshold, prompts: Prompts, setting: Setting
) -> Counts:
    """Decode each prompt alone and count; the tokens are those of any batch."""
    options = setting.options(mode, threshold)
    emitted: list[Emission] = []
    layer_rows, checks, agreeing, later, drafted, passes = 0, 0, 0, 0, 0, 0
    for prompt in prompts:
        decoder = make_decoder(
            model,
            mode,
            options.policy,
            options.sampling,
            seed=options.seed,
            recompute_limit=options.recompute_limit,
            capacity=len(prompt) + setting.new_tokens - 1,
            vocab_size=setting.vocab_size,
        )
        found = []
        for emission in decoder.emissions(prompt):
            found.append(emission)
            if len(found) == setting.new_tokens:
                break
        work = decoder.rows.work
        layer_rows += work.layer_rows - len(prompt) * model.run.model.num_layers
        checks += work.checks
        # All tokens came with their forwards, those that a last round had left over included.
        later += len(found) - 1
        if isinstance(decoder, SpeculativeDecoder):
            drafted += decoder.drafted
            passes += work.full_passes - 1
        emitted += found
        agreeing += _agreeing(model, prompt, [one.token for one in found], setting.vocab_size)
    return Counts(
        exits=_histogram(model, emitted),
        mean_depth=sum(one.depth for one in emitted) / len(emitted),
        layers_per_token=layer_rows / max(1, later),
        checks_per_token=checks / max(1, later),
        agreement=agreeing / len(emitted),
        rounds=Rounds(drafted / passes, later / passes) if passes else None,
    )


def count_pipeline(
    engine: Engine, model: EarlyExitGPT, threshold: Threshold, prompts: Prompts, setting: Setting
) -> Counts:
    """:func:`count` of pipeline stages, which run every layer on every token.

    Args:
        model: the same, whole; says which tokens are the full model's.
    """
    options = setting.options("pipeline", threshold)
    depths = [exit_.depth for exit_, _ in options.policy.for_exits(model.stage_spec.exits)]
    emitted: list[Emission] = []
    agreeing = 0
    for prompt in prompts:
        found = decode_alone(engine, prompt, options)
        agreeing += _agreeing(model, prompt, [one.token for one in found], setting.vocab_size)
        emitted += found
    return Counts(
        exits=_histogram(model, emitted),
        mean_depth=sum(one.depth for one in emitted) / len(emitted),
        layers_per_token=float(model.run.model.num_layers),
        checks_per_token=sum(d <= one.depth for one in emitted for d in depths) / len(emitted),
        agreement=agreeing / len(emitted),
    )


def decode_alone(engine: Engine, prompt: Sequence[int], options: GenerateOptions) -> list[Emission]:
    """What an engine that is idle emits after a prompt."""
    engine.submit(Request(tuple(prompt), options))
    found: list[Emission] = []
    while engine.running or engine.waiting:
        found += [event.emission for event in engine.step() if event.emission is not None]
    return found


def _histogram(model: EarlyExitGPT, emitted: Sequence[Emission]) -> dict[str, int]:
    found = Counter(one.exit for one in emitted)
    depths = sorted(exit_.depth for exit_ in model.stage_spec.exits)
    return {name: found[name] for name in (*map(exit_name, depths), FINAL)}


@torch.no_grad()
def _agreeing(model: EarlyExitGPT, prompt: Sequence[int], tokens: Sequence[int], vocab_size: int) -> int:
    """How many of the tokens are the full model's choice after the text before them."""
    text = [*prompt, *tokens[:-1]]
    tokens_BS = torch.tensor([text], device=next(model.parameters()).device)
    hidden_SBH = model.embed(tokens_BS, torch.arange(len(text), device=tokens_BS.device)[None])
    hidden_SBH = model.run_layers(hidden_SBH, model.rotary(len(text)), 0, model.run.model.num_layers)
    logits_SV = model.final_logits(hidden_SBH[len(prompt) - 1 :])[:, 0, :vocab_size]
    return sum(a == b for a, b in zip(logits_SV.argmax(-1).tolist(), tokens, strict=True))


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
