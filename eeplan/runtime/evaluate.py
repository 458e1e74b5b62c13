"""`eeplan evaluate`: what each exit of a checkpoint is worth on held-out text, and how often tokens leave.

One forward with the true tokens as input judges every exit and every threshold (``decode.quality``). The
usage that comes of it is written in the form that `eeplan plan --usage` reads, so that a second plan is made
from what the first model learnt.

How fast a threshold makes decoding is predicted from a profile, and measured here on a few prompts.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary, E exits, N = S x B tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eeplan.console import Progress
from eeplan.errors import DataError, DecodeError
from eeplan.files import require_writable_file
from eeplan.plan import Plan
from eeplan.profile import OpProfile, load_profile
from eeplan.runtime.checkpoint import load_model, load_tokenizer_path, resolve
from eeplan.runtime.data import dataset_of_file
from eeplan.runtime.dataset_files import DataFiles, part_documents, read_summary
from eeplan.runtime.decode.generate import this_process
from eeplan.runtime.decode.policy import CONFIDENCE_KINDS, ConfidenceKind
from eeplan.runtime.decode.quality import (
    THRESHOLDS,
    Outcomes,
    exit_quality,
    joined,
    measured_usage,
    threshold_quality,
)
from eeplan.runtime.evaluate_speed import DEFAULT_SPEED_PROMPTS, measured_speeds, spread_prompts
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.stage import FINAL, exit_name
from eeplan.runtime.tokenizer import Tokenizer, load_tokenizer
from eeplan.schema import write_yaml
from eeplan.sim.decode_process import Exit
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import Layout
from eeplan.spec import DECODE_MODES, RunSpec
from eeplan.usage import ExitUsage, MeasuredUsage, exit_shares

DEFAULT_MAX_TOKENS = 16_384
BATCH = 8
"""Sequences of one forward."""
PROFILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Text to judge exits on."""

    windows: NDArray[np.int64]
    """[sequences, S + 1] tokens; the last of each is only predicted."""
    sentence: str
    """Where it comes from, in words."""


def evaluate(
    checkpoint: Path,
    data: Path,
    *,
    usage_out: Path | None = None,
    profile: Path | None = None,
    confidence: str = "max_probability",
    max_tokens: int = DEFAULT_MAX_TOKENS,
    speed_prompts: int = DEFAULT_SPEED_PROMPTS,
    progress: Progress,
) -> dict[str, Any]:
    """Judge a checkpoint's exits on text.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        data: prefix of a dataset, of which the part held out from training counts if the model was trained on
            it; or a text or ``.jsonl`` file.
        usage_out: where to write the usage file.
        profile: op costs for the predictions; else the run folder's ``profile.yaml`` if there is one.
        confidence: one of ``CONFIDENCE_KINDS``.
        max_tokens: of the text, from its beginning.
        speed_prompts: that speed is measured on, from the same text; 0 leaves measuring out.

    Returns:
        Plain data. ``checkpoint``, ``data``, ``num_tokens``, ``confidence``; ``exits``, by depth, each
        ``name``, ``depth`` and what :func:`quality.exit_quality` gives; ``thresholds``, each what
        :func:`quality.threshold_quality` gives, ``predicted``, {mode: {tokens_per_s, speed_up}} or None, and
        ``measured``, see :func:`speed.threshold_speeds`, or None; ``plan_threshold``, which the plan decodes
        with; ``speed``, what was measured on: ``prompts``, their ``prompt_tokens``, ``new_tokens`` of each,
        ``device``, ``threads`` and ``dtype``, or None; ``profile``, the file that the predictions come from,
        or None; ``usage``, the file written, or None.

    Raises:
        CheckpointError, DataError, ProfileError: missing, damaged, or not belonging together.
        DecodeError: an option is out of range; a usage file of a model without early exits.
    """
    kind = _confidence_kind(confidence)
    if max_tokens < 1:
        raise DecodeError(f"max tokens is {max_tokens}; expected at least 1")
    if speed_prompts < 0:
        raise DecodeError(f"speed prompts is {speed_prompts}; expected 0, which measures no speed, or more")
    if usage_out is not None:
        require_writable_file(usage_out, "usage file")
    folder = resolve(checkpoint)
    costs_path = profile or profile_beside(folder)
    costs = load_profile(costs_path)[0] if costs_path is not None else None
    with this_process() as here:
        model, plan = load_model(folder, here)
        tokenizer = load_tokenizer(load_tokenizer_path(folder))
        text = held_out(data, plan.run, tokenizer, max_tokens)
        outcomes = run_model(model, text.windows, kind, progress)
        prompts = spread_prompts(text.windows, speed_prompts) if plan.exits else []
        speeds, speed = measured_speeds(model, plan, prompts, tokenizer.vocab_size, kind, progress)
    depths = [exit_.depth for exit_ in plan.exits]
    source = f"checkpoint {folder.name} of run '{plan.run.name}' on {text.sentence}; confidence {kind}"
    usage = measured_usage(outcomes, depths, plan.run.model.num_layers, source) if depths else None
    if usage_out is not None:
        if usage is None:
            raise DecodeError(
                "the model has no early exit, so there is no usage to write; leave out the file"
            )
        write_yaml(usage_out, ExitUsage(schema_version=1, measured=usage), "Written by `eeplan evaluate`.")
    return {
        "checkpoint": str(folder),
        "data": text.sentence,
        "num_tokens": outcomes.num_tokens,
        "confidence": kind,
        "exits": _exits(outcomes, plan),
        "thresholds": [
            point | {"measured": measured}
            for point, measured in zip(_thresholds(outcomes, plan, usage, costs), speeds, strict=True)
        ],
        "plan_threshold": plan.run.decode.threshold,
        "speed": speed,
        "recompute_limit": plan.run.decode.recompute_limit,
        "profile": str(costs_path) if costs_path is not None else None,
        "usage": str(usage_out) if usage_out is not None else None,
    }


def held_out(data: Path, run: RunSpec, tokenizer: Tokenizer, max_tokens: int) -> HeldOut:
    """Read text as windows of the model's sequence length.

    Raises:
        DataError: missing, damaged, made by another tokenizer, or shorter than one window.
    """
    if DataFiles(data).summary.is_file():
        return _from_prefix(data, run, tokenizer, max_tokens)
    with dataset_of_file(data, tokenizer) as (prefix, summary):
        stream = _tokens(prefix, range(summary.documents), max_tokens + 1)
    return HeldOut(_windows(stream, run.training.seq_length, data), f"file {data.name}")


def _from_prefix(prefix: Path, run: RunSpec, tokenizer: Tokenizer, max_tokens: int) -> HeldOut:
    documents, sentence = held_out_documents(prefix, run, tokenizer)
    stream = _tokens(prefix, documents, max_tokens + 1)
    return HeldOut(_windows(stream, run.training.seq_length, prefix), sentence)


def held_out_documents(prefix: Path, run: RunSpec, tokenizer: Tokenizer) -> tuple[Sequence[int], str]:
    """Which documents of a dataset the model was not trained on, and a sentence that says so.

    Raises:
        DataError: made by another tokenizer, or trained on as a whole.
    """
    summary = read_summary(DataFiles(prefix))
    if summary.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(
            f"dataset {prefix} was made by another tokenizer than the checkpoint's; give the text itself, or "
            "build the dataset with the checkpoint's tokenizer.json"
        )
    documents, sentence = range(summary.documents), f"dataset {prefix.name}"
    if _is_training_data(prefix, run):
        documents = part_documents(run.data, summary.documents)["valid"]
        sentence = f"the held-out part of dataset {prefix.name}"
        if not documents:
            raise DataError(
                f"dataset {prefix} was trained on, and data.split {run.data.split!r} holds nothing out; give "
                "other text"
            )
    return documents, sentence


def _is_training_data(prefix: Path, run: RunSpec) -> bool:
    """Whether the model was trained on it: the same path, or the same tokens elsewhere."""
    digest = read_summary(DataFiles(prefix)).bin_sha256
    for trained in (Path(one.path) for one in run.data.datasets):
        if prefix.resolve() == trained.resolve():
            return True
        files = DataFiles(trained)
        if files.summary.is_file() and read_summary(files).bin_sha256 == digest:
            return True
    return False


def _tokens(prefix: Path, documents: Sequence[int], most: int) -> NDArray[np.int64]:
    """Tokens of some documents, one after the other, at most so many."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        dataset = IndexedDataset(str(prefix))
        parts, total = [], 0
        for document in documents:
            # Copied, since the file is mapped and may be temporary.
            parts.append(np.array(dataset[document], dtype=np.int64))
            total += len(parts[-1])
            if total >= most:
                break
    except (OSError, ValueError, IndexError, AssertionError) as error:
        raise DataError(f"dataset {prefix} cannot be read ({error}); build it again") from None
    return np.concatenate(parts)[:most] if parts else np.zeros(0, dtype=np.int64)


def _windows(stream: NDArray[np.int64], length: int, where: Path) -> NDArray[np.int64]:
    """[sequences, length + 1]; every token but the first is predicted once, a rest is left out."""
    count = (len(stream) - 1) // length
    if count < 1:
        raise DataError(
            f"{where} has {len(stream)} tokens to judge, less than one sequence of {length}; give more text"
        )
    starts = np.arange(count)[:, None] * length
    return stream[starts + np.arange(length + 1)[None]]


@torch.no_grad()
def run_model(
    model: EarlyExitGPT, windows: NDArray[np.int64], kind: ConfidenceKind, progress: Progress
) -> Outcomes:
    """Judge every exit on every predicted token.

    Args:
        windows: [sequences, S + 1].
    """
    was_training, parts = model.training, []
    model.eval()
    try:
        rotary = model.rotary(windows.shape[1] - 1)
        for start in range(0, len(windows), BATCH):
            progress.update(start, len(windows), "sequences")
            parts.append(_judge_batch(model, torch.from_numpy(windows[start : start + BATCH]), rotary, kind))
    finally:
        model.train(was_training)
    return joined(parts)


def _judge_batch(model: EarlyExitGPT, windows: Tensor, rotary: Tensor, kind: ConfidenceKind) -> Outcomes:
    windows = windows.to(rotary.device)
    tokens_BS, labels_N = windows[:, :-1], windows[:, 1:].t().reshape(-1)
    positions_BS = torch.arange(tokens_BS.shape[1], device=rotary.device).expand_as(tokens_BS)
    found = [
        _outcome(logits_SBV.flatten(0, 1)[:, : model.run.model.vocab_size], labels_N, kind)
        for logits_SBV in _all_logits(model, model.embed(tokens_BS, positions_BS), rotary)
    ]
    cross_entropy, predicted, probability, confidence = (
        np.stack([column.cpu().numpy() for column in columns]) for columns in zip(*found, strict=True)
    )
    return Outcomes(
        cross_entropy_EN=cross_entropy.astype(np.float64),
        predicted_EN=predicted,
        probability_EN=probability.astype(np.float64),
        confidence_EN=confidence.astype(np.float64),
        label_N=labels_N.cpu().numpy(),
    )


def _all_logits(model: EarlyExitGPT, hidden_SBH: Tensor, rotary: Tensor) -> Iterator[Tensor]:
    """Logits [S, B, V] of every exit by depth, the final one last."""
    depth = 0
    for exit_ in sorted(model.stage_spec.exits, key=lambda one: one.depth):
        hidden_SBH = model.run_layers(hidden_SBH, rotary, depth, exit_.depth)
        depth = exit_.depth
        yield model.exit_logits(depth, hidden_SBH, rotary)
    yield model.final_logits(model.run_layers(hidden_SBH, rotary, depth, model.stage_spec.last_layer))


def _outcome(
    logits_NV: Tensor, labels_N: Tensor, kind: ConfidenceKind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy, most likely token, its probability, confidence; all [N]."""
    log_shares_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    highest_N, predicted_N = log_shares_NV.max(-1)
    cross_entropy_N = -log_shares_NV.gather(1, labels_N[:, None])[:, 0]
    probability_N = highest_N.exp()
    confidence_N = probability_N
    if kind == "margin":
        first_and_second = log_shares_NV.topk(2, dim=-1).values.exp()
        confidence_N = first_and_second[:, 0] - first_and_second[:, 1]
    if kind == "entropy":
        entropy_N = torch.special.entr(log_shares_NV.exp()).sum(-1)
        confidence_N = (1.0 - entropy_N / np.log(logits_NV.shape[1])).clamp(min=0.0)
    return cross_entropy_N, predicted_N, probability_N, confidence_N


def _exits(outcomes: Outcomes, plan: Plan) -> list[dict[str, Any]]:
    named = [(exit_name(exit_.depth), exit_.depth, exit_.head) for exit_ in plan.exits]
    named.append((FINAL, plan.run.model.num_layers, "norm"))
    return [
        {"name": name, "depth": depth, "head": head} | exit_quality(outcomes, index)
        for index, (name, depth, head) in enumerate(named)
    ]


def _thresholds(
    outcomes: Outcomes, plan: Plan, usage: MeasuredUsage | None, costs: OpProfile | None
) -> list[dict[str, Any]]:
    depths = (*(exit_.depth for exit_ in plan.exits), plan.run.model.num_layers)
    return [
        threshold_quality(outcomes, threshold, depths)
        | {"predicted": predicted_speed(plan, usage, costs, threshold)}
        for threshold in THRESHOLDS
    ]


def predicted_speed(
    plan: Plan, usage: MeasuredUsage | None, costs: OpProfile | None, threshold: float
) -> dict[str, dict[str, float]] | None:
    """Tokens/s and speed-up over ``full`` by the decode model for each mode; None without costs."""
    if usage is None or costs is None or not costs.decode:
        return None
    layout = Layout(tuple(stage.last_layer - stage.first_layer + 1 for stage in plan.stages))
    exits = [Exit(exit_.depth, exit_.head, exit_.stage) for exit_ in plan.exits]
    shares = exit_shares(usage, threshold, usage.depths, usage.num_layers)
    found: dict[str, dict[str, float]] = {}
    for mode in DECODE_MODES:
        if mode == "pipeline" and layout.num_stages == 1:
            continue
        latency = decode_prediction(costs, layout, exits, shares, mode, plan.run.decode.recompute_limit)
        found[mode] = {"tokens_per_s": 1e9 / latency.ns_per_token, "speed_up": latency.speed_up}
    return found


def profile_beside(folder: Path) -> Path | None:
    """The profile that lies in the run's folder: above the checkpoint, or above ``checkpoints``."""
    for parent in list(folder.resolve().parents)[:2]:
        if (parent / PROFILE).is_file():
            return parent / PROFILE
    return None


def _confidence_kind(name: str) -> ConfidenceKind:
    for kind in CONFIDENCE_KINDS:
        if kind == name:
            return kind
    raise DecodeError(f"confidence is '{name}'; expected one of {', '.join(CONFIDENCE_KINDS)}")
