"""`eeplan calibrate`: exit thresholds that keep a stated distance from the full model, with a certificate.

The text is judged with its own tokens as input (one forward, as in ``evaluate``), cut into units that are
taken as independent. Tokens are not: whether an exit errs depends on the passage. So the unit is a document,
of which some windows are judged and averaged; where there are too few documents, the user may choose windows
as units, and the certificate says what that assumes. The statistics are in ``risk_control``.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eeplan.console import Progress
from eeplan.errors import CheckpointError, DataError, DecodeError
from eeplan.plan import Plan
from eeplan.runtime.checkpoint import load_model, usable
from eeplan.runtime.data import dataset_of_file
from eeplan.runtime.dataset_files import DataFiles
from eeplan.runtime.decode.certificate import Certificate, Selection, TestedSetting, Unit, store_certificate
from eeplan.runtime.decode.generate import this_process
from eeplan.runtime.decode.policy import CONFIDENCE_KINDS, ConfidenceKind
from eeplan.runtime.decode.risk_control import (
    METRICS,
    P_VALUES,
    Judged,
    Metric,
    Tested,
    Thresholds,
    exit_path,
    fixed_sequence,
    last_passed,
    least_units,
    single_settings,
)
from eeplan.runtime.evaluate import BATCH, held_out_documents, run_model
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MAX_TOKENS = 131_072
LEAST_TOKENS = 8
"""A shorter text says next to nothing as a unit, and is left out."""
UNITS: tuple[Unit, ...] = ("document", "sequence")
NameT = TypeVar("NameT", bound=str)


@dataclass(frozen=True, slots=True)
class Asked:
    """Checked options of a calibration; made by :func:`asked_for`."""

    risk: float
    confidence: float
    metric: Metric
    unit: Unit
    kind: ConfidenceKind
    p_value: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Windows:
    """Pieces of text and the units they belong to."""

    tokens: NDArray[np.int64]
    """[windows, S + 1], filled up at the end."""
    lengths: NDArray[np.int64]
    """[windows] predicted tokens of each."""
    units: NDArray[np.int64]
    """[windows] numbered from 0."""


def asked_for(
    *,
    risk: float = 0.02,
    confidence: float = 0.95,
    metric: str = "disagreement",
    unit: str = "document",
    kind: str = "max_probability",
    p_value: str = "hoeffding_bentkus",
    max_tokens: int = DEFAULT_MAX_TOKENS,
    seed: int = 1,
) -> Asked:
    """Check what a user asks for.

    Raises:
        DecodeError: an option is out of range.
    """
    for name, share in (("risk", risk), ("confidence", confidence)):
        if not 0.0 < share < 1.0:
            raise DecodeError(f"{name} is {share}; expected a share between 0 and 1, without both")
    if max_tokens < 1:
        raise DecodeError(f"max tokens is {max_tokens}; expected at least 1")
    if seed < 0:
        raise DecodeError(f"seed is {seed}; expected 0 or more")
    return Asked(
        risk=risk,
        confidence=confidence,
        metric=_named(metric, METRICS, "metric"),
        unit=_named(unit, UNITS, "unit"),
        kind=_named(kind, CONFIDENCE_KINDS, "exit confidence"),
        p_value=_named(p_value, tuple(P_VALUES), "p-value"),
        max_tokens=max_tokens,
        seed=seed,
    )


def calibrate(checkpoint: Path, data: Path, asked: Asked, progress: Progress) -> tuple[Certificate, Path]:
    """Choose thresholds for a checkpoint and store their certificate in its folder.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        data: prefix of a dataset, of which the part held out from training counts if the model was trained on
            it; or a text or ``.jsonl`` file.

    Returns:
        The certificate and its file. Where no threshold passes, thresholds are 1: nobody leaves early.

    Raises:
        CheckpointError, DataError: missing, damaged, or not belonging together. FileError: not writable.
        DecodeError: the model has no early exit.
    """
    folder, manifest, notes = usable(checkpoint)
    for note in notes:
        progress.line(f"eeplan: {note}")
    with this_process() as here:
        model, plan = load_model(folder, here)
        if not plan.exits:
            raise DecodeError("the model has no early exit, so there is no threshold to calibrate")
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        if tokenizer.vocab_size > plan.run.model.vocab_size:
            raise CheckpointError(f"checkpoint {folder}: its tokenizer has more tokens than the model")
        documents, sentence = _documents(data, plan, tokenizer, np.random.default_rng(asked.seed))
        windows = cut(documents, plan.run.training.seq_length, asked, tokenizer.eod)
        judged = judge_windows(model, windows, asked, progress)
    certificate = certify(
        judged,
        plan,
        asked,
        checkpoint=folder.name,
        checkpoint_sha256=str(manifest["manifest_sha256"]),
        data=sentence,
        data_sha256=_tokens_sha256(windows),
    )
    return certificate, store_certificate(folder, certificate)


def cut(documents: Sequence[NDArray[np.int64]], seq_length: int, asked: Asked, filler: int) -> Windows:
    """Windows to judge, at most about ``max_tokens``: of every document the same number, at random places, or
    as many as there is room for, drawn from all.

    Raises:
        DataError: no document is long enough.
    """
    rng = np.random.default_rng([asked.seed, 1])
    pieces = [
        [document[start : start + seq_length + 1] for start in range(0, len(document) - 1, seq_length)]
        for document in documents
    ]
    # A short rest of a longer text is left out; a short text is all there is.
    pieces = [[p for p in piece if len(p) > LEAST_TOKENS] for piece in pieces]
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        raise DataError(f"no document to calibrate on has more than {LEAST_TOKENS} tokens; give more text")
    most = max(1, asked.max_tokens // seq_length)
    if asked.unit == "document":
        pieces = pieces[:most]
        each = max(1, most // len(pieces))
        chosen = [
            (unit, piece[index])
            for unit, piece in enumerate(pieces)
            for index in sorted(rng.permutation(len(piece))[:each])
        ]
    else:
        flat = [window for piece in pieces for window in piece]
        chosen = list(enumerate(flat[index] for index in rng.permutation(len(flat))[:most]))
    tokens = np.full((len(chosen), seq_length + 1), filler, dtype=np.int64)
    for row, (_, window) in enumerate(chosen):
        tokens[row, : len(window)] = window
    lengths = np.array([len(window) - 1 for _, window in chosen])
    return Windows(tokens, lengths, np.array([unit for unit, _ in chosen]))


def judge_windows(model: EarlyExitGPT, windows: Windows, asked: Asked, progress: Progress) -> Judged:
    """What every exit says about every token of the windows."""
    outcomes = run_model(model, windows.tokens, asked.kind, progress)
    length = windows.tokens.shape[1] - 1
    units, real = [], []
    for start in range(0, len(windows.tokens), BATCH):
        part = slice(start, start + BATCH)
        # The order of run_model: by batches, in each by position, then by sequence.
        real.append((np.arange(length)[:, None] < windows.lengths[part][None]).ravel())
        units.append(np.broadcast_to(windows.units[part][None], (length, len(windows.units[part]))).ravel())
    real_N = np.concatenate(real)
    kept = type(outcomes)(
        cross_entropy_EN=outcomes.cross_entropy_EN[:, real_N],
        predicted_EN=outcomes.predicted_EN[:, real_N],
        probability_EN=outcomes.probability_EN[:, real_N],
        confidence_EN=outcomes.confidence_EN[:, real_N],
        label_N=outcomes.label_N[real_N],
    )
    return Judged(kept, np.concatenate(units)[real_N], asked.metric)


def certify(
    judged: Judged,
    plan: Plan,
    asked: Asked,
    *,
    checkpoint: str,
    checkpoint_sha256: str,
    data: str,
    data_sha256: str,
) -> Certificate:
    """Test thresholds on judged units: one for all exits and, where there are several, one for each."""
    depths = (*sorted(exit_.depth for exit_ in plan.exits), plan.run.model.num_layers)
    single, per_exit = select(judged, depths, asked)
    better = per_exit is not None and per_exit.mean_depth < single.mean_depth
    return Certificate(
        checkpoint=checkpoint,
        checkpoint_sha256=checkpoint_sha256,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metric=asked.metric,
        risk=asked.risk,
        confidence=asked.confidence,
        p_value=asked.p_value,
        unit=asked.unit,
        units=judged.num_units,
        tokens=judged.outcomes.num_tokens,
        data=data,
        data_sha256=data_sha256,
        seed=asked.seed,
        confidence_kind=asked.kind,
        exits=depths[:-1],
        single=single,
        per_exit=per_exit,
        chosen="per_exit" if better else "single",
        statement=_statement(asked, judged.num_units, single.passed or better, single.level),
        assumption=_assumption(asked),
    )


def select(judged: Judged, depths: Sequence[int], asked: Asked) -> tuple[Selection, Selection | None]:
    """The loosest thresholds that pass: the same for all exits, and one for each (None for one exit).

    Both statements hold together with the asked confidence: each is tested at half of what it leaves.
    """
    num_exits = len(depths) - 1
    error = (1.0 - asked.confidence) / (1 if num_exits == 1 else 2)
    single = _selection(judged, single_settings(num_exits), depths, asked, error)
    if num_exits == 1 or judged.num_units < 2:
        return single, None
    halves = np.random.default_rng([asked.seed, 2]).permutation(judged.num_units) % 2 == 0
    path = exit_path(judged.of_units(halves), depths, asked.risk)
    return single, _selection(judged.of_units(~halves), path, depths, asked, error)


def _selection(
    judged: Judged, settings: Sequence[Thresholds], depths: Sequence[int], asked: Asked, error: float
) -> Selection:
    tested = fixed_sequence(judged, settings, asked.risk, error, P_VALUES[asked.p_value])
    passed = last_passed(tested, error)
    thresholds = passed.thresholds if passed else (1.0,) * (len(depths) - 1)
    shares = np.bincount(judged.leaving(thresholds), minlength=len(depths)) / judged.outcomes.num_tokens
    return Selection(
        thresholds=thresholds,
        passed=passed is not None,
        level=error,
        units_tested=judged.num_units,
        mean_loss=passed.mean_loss if passed else 0.0,
        p_value=passed.p_value if passed else None,
        mean_depth=float(shares @ np.asarray(depths)),
        exit_shares=tuple(shares.tolist()),
        tested=tuple(map(_tested, tested)),
    )


def _tested(one: Tested) -> TestedSetting:
    return TestedSetting(thresholds=one.thresholds, mean_loss=one.mean_loss, p_value=one.p_value)


def _statement(asked: Asked, units: int, passed: bool, level: float) -> str:
    what = {
        "disagreement": "the share of tokens that are not the full model's most likely token",
        "accuracy_loss": "the share of tokens that the full model gets right and the emitting exit wrong",
    }[asked.metric]
    if not passed:
        return (
            f"no threshold passed, so nothing leaves early (threshold 1): {units} {asked.unit}s were judged, "
            f"and it takes at least {least_units(asked.risk, level)} without any loss "
            f"to bound a risk of {asked.risk:g} with confidence {asked.confidence:g}"
        )
    return (
        f"with confidence {asked.confidence:g} over the draw of the {asked.unit}s, in a new {asked.unit} "
        f"{what} is expected to be at most {asked.risk:g}"
    )


def _assumption(asked: Asked) -> str:
    independent = {
        "document": "documents, the new one included, are drawn independently from one source; tokens inside "
        "a document may depend on each other in any way",
        "sequence": "windows of the model's sequence length are independent draws, although neighbours come "
        "from the same document; dependence between them makes the confidence smaller than stated",
    }[asked.unit]
    return (
        f"{independent}; every token is judged after the text's own tokens, not after tokens that the model "
        "generated, and as the most likely one (temperature 0)"
    )


def _documents(
    data: Path, plan: Plan, tokenizer: Tokenizer, rng: np.random.Generator
) -> tuple[list[NDArray[np.int64]], str]:
    """Documents in random order, and where they come from."""
    if DataFiles(data).summary.is_file():
        chosen, sentence = held_out_documents(data, plan.run, tokenizer)
        return list(_read(data, rng.permutation(np.asarray(chosen)).tolist())), sentence
    with dataset_of_file(data, tokenizer) as (prefix, summary):
        return list(_read(prefix, rng.permutation(summary.documents).tolist())), f"file {data.name}"


def _read(prefix: Path, documents: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        dataset = IndexedDataset(str(prefix))
        for document in documents:
            # Copied, since the file is mapped and may be temporary.
            yield np.array(dataset[document], dtype=np.int64)
    except (OSError, ValueError, IndexError, AssertionError) as error:
        raise DataError(f"dataset {prefix} cannot be read ({error}); build it again") from None


def _tokens_sha256(windows: Windows) -> str:
    return hashlib.sha256(windows.tokens.astype("<i8").tobytes()).hexdigest()


def _named(name: str, names: Sequence[NameT], what: str) -> NameT:
    for one in names:
        if one == name:
            return one
    raise DecodeError(f"{what} is '{name}'; expected one of {', '.join(names)}")
