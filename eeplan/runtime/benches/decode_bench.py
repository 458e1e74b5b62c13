"""``eeplan bench decode`` from the checkpoint to the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eeplan.bench_decode import Counts, Predictor, contenders, ratios_of, run_of
from eeplan.console import Progress
from eeplan.decode_speed import Contender, Name, Threshold
from eeplan.errors import DecodeError
from eeplan.plan import Plan
from eeplan.profile import DecodeCosts, OpProfile, load_profile
from eeplan.runtime.backend import Backend, software
from eeplan.runtime.benches import decode as timing
from eeplan.runtime.benches import llama as hf
from eeplan.runtime.checkpoint import TOKENIZER, load_model, usable
from eeplan.runtime.decode.certificate import load_certificate
from eeplan.runtime.decode.generate import this_process
from eeplan.runtime.decode.modes import MODES
from eeplan.runtime.decode.pipeline import PipelineEngine
from eeplan.runtime.decode.speed import Prompts, Ran, Setting, time_all
from eeplan.runtime.decode_timing import DecodeTimer
from eeplan.runtime.evaluate import held_out, profile_beside
from eeplan.runtime.launch import available_cores
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.recording import device_fingerprint
from eeplan.runtime.tokenizer import load_tokenizer

EXIT_MODES: tuple[Name, ...] = ("catch_up", "kv_recompute", "self_speculative")
STEP_ROUNDS = 6
"""Rounds of single decode steps in every round of contenders."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user may choose."""

    batches: tuple[int, ...] = (1, 8)
    thresholds: tuple[float, ...] = (0.6, 0.3, 0.1)
    """Besides the calibrated one."""
    rounds: int = 8
    """Each gives every contender the same prompts; ratios are within a round."""
    new_tokens: int = 48
    prompt_tokens: int = 16
    pipeline_size: int = 2
    """Processes of mode ``pipeline``; 1 leaves it out."""


def bench_decode(
    checkpoint: Path, asked: Asked, *, data: Path | None, profile: Path | None, progress: Progress
) -> dict[str, Any]:
    """Decode with every mode, greedily, on prompts from text that the model was not trained on.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        data: prefix of a dataset, or a text file; None takes the run's own data.
        profile: for predictions; None takes the run folder's ``profile.yaml``. Decode steps of one process
            are measured again between the contenders, on this model and on the machine as it is then; those
            of a pipeline, whose processes are all busy, are the profile's.

    Returns:
        ``model``; ``hardware``; ``setting``; ``runs``, see ``bench_decode.run_of``; ``ratios``, see
        ``bench_decode.ratios_of``; ``ratios_threshold``, and where it comes from.

    Raises:
        CheckpointError, DataError, ProfileError: missing, damaged, or not belonging together.
        DecodeError: an option is out of range, or the model has no early exit.
    """
    folder, manifest, _ = usable(checkpoint)
    costs_path = profile or profile_beside(folder)
    known = load_profile(costs_path)[0] if costs_path is not None else None
    certificate = load_certificate(folder, str(manifest["manifest_sha256"]))
    torch.set_num_threads(available_cores())
    with this_process() as here:
        model, plan = load_model(folder, here)
        model.eval()
        tokenizer = load_tokenizer(folder / TOKENIZER)
        setting = _setting(asked, plan, tokenizer.vocab_size)
        wanted = asked.rounds * max(asked.batches)
        source = data or Path(plan.run.data.datasets[0].path)
        text = held_out(source, plan.run, tokenizer, wanted * plan.run.training.seq_length)
        windows = [text.windows[index % len(text.windows)] for index in range(wanted)]
        prompts = [[int(token) for token in window[: asked.prompt_tokens]] for window in windows]
        if certificate is not None:
            found = certificate.thresholds
            chosen, origin = found[0] if len(found) == 1 else found, certificate.statement
        else:
            chosen, origin = plan.run.decode.threshold, "decode.threshold of the plan; not calibrated"
        thresholds = [chosen, *(one for one in asked.thresholds if one != chosen)]
        local = contenders(EXIT_MODES, asked.batches, thresholds)
        progress.line("count exits and layers")
        # Those that a single sequence is timed on.
        few = prompts[:: max(asked.batches)]
        counts = _counts(model, local, few, setting)
        context, threads = asked.prompt_tokens + setting.new_tokens // 2, torch.get_num_threads()
        steps = DecodeTimer(model, context, processes=1, threads=threads, vocab_size=setting.vocab_size)
        others = _transformers(model, here, setting, prompts[0], asked.batches, progress)
        with _pipeline(folder, asked, here, setting) as (pipeline, threads):
            if pipeline is not None:
                progress.line(f"start {asked.pipeline_size} pipeline stages")
                for threshold in thresholds:
                    counts["pipeline", threshold] = timing.count_pipeline(
                        pipeline, model, threshold, few, setting
                    )
                    run = timing.pipeline_runs(pipeline, threshold, threads, setting)
                    others += [(Contender("pipeline", batch, threshold), run) for batch in asked.batches]
            progress.line(f"{asked.rounds} rounds")
            timings = time_all(
                model,
                local,
                prompts,
                setting,
                rounds=asked.rounds,
                others=others,
                between=lambda: _some_rounds(steps),
                progress=progress,
            )
        hardware = {
            "device": device_fingerprint(here.device),
            "software": software(),
            "threads": torch.get_num_threads(),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        }
    costs = steps.costs()
    predictor = Predictor(plan, _with_decode(known, costs), asked.pipeline_size)
    runs = []
    for one, took in timings.items():
        counted = counts.get((one.mode, one.threshold))
        runs.append(run_of(one, took, counted, predictor.tokens_per_s(one, took, counted)))
    return {
        "model": _about(folder, plan),
        "hardware": hardware,
        "setting": {
            "prompts": text.sentence,
            "prompt_tokens": asked.prompt_tokens,
            "new_tokens": setting.new_tokens,
            "rounds": asked.rounds,
            "recompute_limit": setting.recompute_limit,
            "pipeline_size": asked.pipeline_size,
            "profile": str(costs_path) if costs_path is not None else None,
        },
        "runs": runs,
        "ratios": ratios_of(timings, chosen, _full_ops_s(costs, plan.run.model.num_layers)),
        "ratios_threshold": {"threshold": chosen, "origin": origin},
    }


def _setting(asked: Asked, plan: Plan, vocab_size: int) -> Setting:
    """What all contenders share.

    Raises:
        DecodeError: an option is out of range, or the model has no early exit.
    """
    if not plan.exits:
        raise DecodeError("the model has no early exit, so there are no modes to compare")
    if min(asked.rounds, asked.new_tokens - 1, asked.prompt_tokens, *asked.batches) < 1:
        raise DecodeError("rounds, batch and prompt tokens must be at least 1, new tokens at least 2")
    longest = plan.run.training.seq_length
    if asked.prompt_tokens + asked.new_tokens - 1 > longest:
        raise DecodeError(
            f"{asked.prompt_tokens} prompt tokens and {asked.new_tokens} new ones do not fit the model's "
            f"sequences of {longest}; ask for fewer"
        )
    limit = plan.run.decode.recompute_limit
    return Setting(vocab_size, asked.new_tokens, limit, confidence="max_probability")


def _counts(
    model: EarlyExitGPT, local: Sequence[Contender], prompts: Prompts, setting: Setting
) -> dict[tuple[Name, Threshold], Counts]:
    """By mode and threshold; they are the same for every batch size."""
    keys = dict.fromkeys((one.mode, one.threshold) for one in local)
    return {
        (mode, threshold): timing.count(model, mode, threshold, prompts, setting)
        for name, threshold in keys
        for mode in MODES
        if mode == name
    }


@contextlib.contextmanager
def _pipeline(
    folder: Path, asked: Asked, here: Backend, setting: Setting
) -> Iterator[tuple[PipelineEngine | None, int]]:
    """Pipeline stages for the body, and this process's threads meanwhile; on CPU only."""
    if asked.pipeline_size == 1 or here.is_cuda:
        yield None, 1
        return
    threads = torch.get_num_threads()
    engine = PipelineEngine(
        folder,
        pipeline_size=asked.pipeline_size,
        vocab_size=setting.vocab_size,
        max_running=max(asked.batches),
    )
    stage_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield engine, stage_threads
    finally:
        engine.close()


def _transformers(
    model: EarlyExitGPT,
    here: Backend,
    setting: Setting,
    prompt: Sequence[int],
    batches: Sequence[int],
    progress: Progress,
) -> list[tuple[Contender, Callable[[Prompts], Ran]]]:
    """The equal model in ``transformers``, where it is installed; on CPU only."""
    if here.is_cuda or not hf.has_transformers():
        progress.line("transformers is not installed; pip install 'eeplan[bench]' compares with it")
        return []
    progress.line("build the equal model in transformers")
    llama = hf.equal_llama(model, setting.vocab_size)
    hf.require_equal_logits(model, llama, prompt)
    run = timing.transformers_runs(llama, setting)
    return [(Contender("transformers", batch), run) for batch in batches]


def _some_rounds(steps: DecodeTimer) -> None:
    for _ in range(STEP_ROUNDS):
        steps.round()


def _with_decode(known: OpProfile | None, costs: DecodeCosts) -> OpProfile | None:
    """The profile with decode steps of one process as measured now."""
    if known is None:
        return None
    others = tuple(one for one in known.decode if one.processes != costs.processes)
    return known.model_copy(update={"decode": (costs, *others)})


def _full_ops_s(costs: DecodeCosts, num_layers: int) -> float:
    """Embedding, layers and final head on one row."""
    mean_s = {one.op: one.time.mean_s for one in costs.ops if one.rows == one.sequences == 1}
    return mean_s["embedding"] + num_layers * mean_s["layer"] + mean_s["final_head"]


def _about(folder: Path, plan: Plan) -> dict[str, Any]:
    model = plan.run.model
    return {
        "checkpoint": folder.name,
        "run": plan.run.name,
        **model.model_dump(mode="json"),
        "exits": [{"depth": exit_.depth, "head": exit_.head} for exit_ in plan.exits],
    }
