"""From a checkpoint to an engine and to what a server knows about it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from eeplan.errors import DecodeError
from eeplan.plan import Plan, load_plan
from eeplan.runtime.checkpoint import PLAN, TOKENIZER, load_model, usable
from eeplan.runtime.decode.certificate import Certificate, load_certificate
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.frequent import AskedCandidates, known_frequent
from eeplan.runtime.decode.generate import this_process
from eeplan.runtime.decode.modes import DEFAULT_MODE, MODES, Mode, decode_mode
from eeplan.runtime.decode.options import check_candidates, parse_dtype
from eeplan.runtime.decode.pipeline import PIPELINE_MODES, PipelineEngine
from eeplan.runtime.decode.policy import Candidates, exit_policy
from eeplan.runtime.decode.requests import Engine
from eeplan.runtime.decode.weights import weights_of
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.precision import dtype_of
from eeplan.runtime.serve.chat import chat_template
from eeplan.runtime.serve.settings import Served
from eeplan.runtime.tokenizer import load_tokenizer
from eeplan.spec import Precision, RunSpec

CALIBRATED = "calibrated"
NEVER = (1.0,)


@contextlib.contextmanager
def opened(
    checkpoint: Path,
    *,
    name: str | None = None,
    threshold: Sequence[str] = (),
    mode: str | None = None,
    candidates: AskedCandidates | None = None,
    dtype: str | None = None,
    max_running: int = 8,
    pipeline_size: int = 1,
    tensor_size: int = 1,
) -> Iterator[tuple[Served, Engine]]:
    """Load a checkpoint for the body.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        name: as clients call the model; the run's name by default.
        threshold: numbers, or ``calibrated``; see :func:`default_thresholds`.
        mode: where requests name none; by default what suits the number of processes.
        candidates: where requests name none; None is none.
        dtype: what to compute in, ``fp32``, ``bf16`` or ``fp16``; default, the checkpoint's own.
        pipeline_size: stages, each in a process of its own.
        tensor_size: processes that share each stage; with 1 of both this process decodes.

    Raises:
        CheckpointError, DataError: missing, damaged, or not belonging together.
        DecodeError: an option is out of range.
    """
    if name is not None and not name.strip():
        raise DecodeError("the model's name is empty; give one, or leave it out for the run's")
    folder, manifest, notes = usable(checkpoint)
    for note in notes:
        print(f"eeplan: {note}", file=sys.stderr)
    plan = load_plan(folder / PLAN)
    precision = parse_dtype(dtype, plan.run.training.precision)
    certificate = valid_certificate(folder, str(manifest["manifest_sha256"]), plan.run, precision, threshold)
    thresholds = default_thresholds(threshold, certificate)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > plan.run.model.vocab_size:
        raise DecodeError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {plan.run.model.vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    asked = candidates or AskedCandidates()
    frequent = known_frequent(asked, plan.run, tokenizer)
    exit_policy(thresholds).for_exits(exits_of(plan))
    modes, default_mode = possible_modes(mode, pipeline_size * tensor_size)
    shortlist = asked.resolved(frequent)
    if mode is not None:
        check_candidates(shortlist, default_mode)
    served = Served(
        name=name or plan.run.name,
        checkpoint=folder.name,
        num_layers=plan.run.model.num_layers,
        exit_depths=tuple(sorted(exit_.depth for exit_ in plan.exits)),
        seq_length=plan.run.training.seq_length,
        tokenizer=tokenizer,
        template=chat_template(folder / TOKENIZER),
        certificate=certificate,
        thresholds=thresholds,
        created=int(folder.stat().st_mtime),
        modes=modes,
        default_mode=default_mode,
        dtype=precision,
        candidates=shortlist,
        frequent=frequent,
    )
    with _engine(folder, served, max_running, pipeline_size, tensor_size) as engine:
        yield served, engine


def exits_of(plan: Plan) -> tuple[ExitSpec, ...]:
    """The exits of a planned model, as decoding knows them."""
    return tuple(ExitSpec(exit_.depth, exit_.head, exit_.tied) for exit_ in plan.exits)


def possible_modes(mode: str | None, num_processes: int) -> tuple[tuple[Mode, ...], Mode]:
    """The modes that so many processes decode in, and the one asked for, or by default the best of them.

    Raises:
        DecodeError: no such mode, or not one of these.
    """
    modes: tuple[Mode, ...] = MODES if num_processes == 1 else PIPELINE_MODES
    chosen = decode_mode(mode) if mode is not None else DEFAULT_MODE if num_processes == 1 else modes[0]
    if chosen not in modes:
        processes = "one process decodes" if num_processes == 1 else f"{num_processes} processes decode"
        raise DecodeError(f"mode is '{chosen}'; {processes} in mode {' or '.join(modes)}")
    return modes, chosen


@contextlib.contextmanager
def _engine(
    folder: Path, served: Served, max_running: int, pipeline_size: int, tensor_size: int
) -> Iterator[Engine]:
    vocab_size, dtype = served.tokenizer.vocab_size, dtype_of(served.dtype)
    with this_process() as here:
        if pipeline_size * tensor_size > 1:
            pipeline = PipelineEngine(
                folder,
                pipeline_size=pipeline_size,
                tensor_size=tensor_size,
                vocab_size=vocab_size,
                max_running=max_running,
                dtype=str(dtype).removeprefix("torch."),
            )
            try:
                yield pipeline
            finally:
                pipeline.close()
            return
        model, _ = load_model(folder, here)
        weights = weights_of(model, served.seq_length, vocab_size, dtype=dtype)
        del model
        yield LocalEngine(weights, max_running=max_running)


def valid_certificate(
    folder: Path, manifest_sha256: str, run: RunSpec, precision: Precision, asked: Sequence[str] = ()
) -> Certificate | None:
    """The checkpoint's certificate, if it has one that holds for what is computed in ``precision``.

    It was made with the checkpoint's own kind of number. Other numbers round confidences and likeliest tokens
    differently, and the bound says nothing of them; then stderr says so, where the thresholds would be its.

    Args:
        asked: thresholds, see :func:`default_thresholds`.

    Raises:
        DecodeError: the certificate's thresholds are asked for, and it does not hold.
        CheckpointError: it is damaged.
    """
    own, certificate = run.training.precision, load_certificate(folder, manifest_sha256)
    if certificate is None or precision == own:
        return certificate
    if list(asked) == [CALIBRATED]:
        raise DecodeError(
            f"threshold is 'calibrated', but the certificate holds for {own}, in which it was made, and not "
            f"for {precision}; leave the dtype out, or give a threshold"
        )
    if not asked:
        print(
            f"eeplan: the checkpoint's certificate holds for {own}, not for {precision}; it is not used",
            file=sys.stderr,
        )
    return None


def default_thresholds(asked: Sequence[str], certificate: Certificate | None) -> tuple[float, ...]:
    """Thresholds to decode with: those asked for, else the certificate's, else 1, where nothing leaves early.

    Args:
        asked: numbers, one for all exits or one for each; or ``calibrated`` alone, which insists on a
            certificate.

    Raises:
        DecodeError: no numbers, out of range, or no certificate.
    """
    numbers = threshold_numbers(asked)
    if numbers is not None:
        return numbers
    if certificate is not None:
        return certificate.thresholds
    if asked:
        raise DecodeError(
            "threshold is 'calibrated', but the checkpoint has no certificate; run `eeplan calibrate`"
        )
    return NEVER


def threshold_numbers(asked: Sequence[str]) -> tuple[float, ...] | None:
    """The numbers asked for; None where none are, or the calibrated ones.

    Raises:
        DecodeError: no numbers, or out of range.
    """
    if not asked or list(asked) == [CALIBRATED]:
        return None
    try:
        numbers = tuple(map(float, asked))
    except ValueError:
        wrong = " ".join(asked)
        raise DecodeError(
            f"threshold is '{wrong}'; expected numbers from 0 to 1, or 'calibrated' alone"
        ) from None
    return exit_policy(numbers).thresholds


def thresholds_sentence(
    thresholds: Sequence[float], certificate: Certificate | None, candidates: Candidates | None = None
) -> str:
    """What the thresholds are and where they come from, for people."""
    listed = ", ".join(f"{one:g}" for one in thresholds)
    if certificate is not None and tuple(thresholds) == certificate.thresholds:
        if candidates is not None and candidates.number:
            return f"threshold {listed}, calibrated without candidates: with them, nothing is promised"
        return f"threshold {listed}, calibrated: {certificate.statement}"
    if certificate is None and tuple(thresholds) == NEVER:
        return "threshold 1, nothing leaves early; give a lower one, or let `eeplan calibrate` find one"
    return f"threshold {listed}, not calibrated"
