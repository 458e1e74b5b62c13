"""What ``eeplan bench decode`` times besides this process's engine (see ``decode.speed``), and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eeplan.bench_decode import Counts
from eeplan.decode_speed import Threshold
from eeplan.runtime.benches import llama as hf
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.modes import Mode, make_decoder
from eeplan.runtime.decode.options import GenerateOptions
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.decode.speculative import SpeculativeDecoder
from eeplan.runtime.decode.speed import Prompts, Ran, Setting, engine_run
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.stage import FINAL, exit_name
from eeplan.sim.decode_batch import Rounds


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
