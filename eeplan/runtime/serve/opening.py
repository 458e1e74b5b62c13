"""From a checkpoint to an engine and to what a server knows about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from eeplan.errors import DecodeError
from eeplan.runtime.checkpoint import TOKENIZER, load_model, usable
from eeplan.runtime.decode.certificate import Certificate, load_certificate
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.generate import this_process
from eeplan.runtime.decode.modes import DEFAULT_MODE, MODES, decode_mode
from eeplan.runtime.decode.policy import exit_policy
from eeplan.runtime.decode.requests import Engine
from eeplan.runtime.serve.chat import chat_template
from eeplan.runtime.serve.settings import Served
from eeplan.runtime.tokenizer import load_tokenizer

CALIBRATED = "calibrated"
NEVER = (1.0,)


@contextlib.contextmanager
def opened(
    checkpoint: Path,
    *,
    name: str | None = None,
    threshold: Sequence[str] = (),
    mode: str = DEFAULT_MODE,
    max_running: int = 8,
) -> Iterator[tuple[Served, Engine]]:
    """Load a checkpoint for the body.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        name: as clients call the model; the run's name by default.
        threshold: numbers, or ``calibrated``; see :func:`default_thresholds`.

    Raises:
        CheckpointError, DataError: missing, damaged, or not belonging together.
        DecodeError: an option is out of range.
    """
    folder, manifest, _ = usable(checkpoint)
    certificate = load_certificate(folder, str(manifest["manifest_sha256"]))
    thresholds = default_thresholds(threshold, certificate)
    with this_process() as here:
        model, plan = load_model(folder, here)
        model.eval()
        tokenizer = load_tokenizer(folder / TOKENIZER)
        if tokenizer.vocab_size > plan.run.model.vocab_size:
            raise DecodeError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {plan.run.model.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        exit_policy(thresholds).for_exits(model.stage_spec.exits)
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
            modes=MODES,
            default_mode=decode_mode(mode),
        )
        yield served, LocalEngine(model, vocab_size=tokenizer.vocab_size, max_running=max_running)


def default_thresholds(asked: Sequence[str], certificate: Certificate | None) -> tuple[float, ...]:
    """Thresholds to decode with: those asked for, else the certificate's, else 1, where nothing leaves early.

    Args:
        asked: numbers, one for all exits or one for each; or ``calibrated`` alone, which insists on a
            certificate.

    Raises:
        DecodeError: no numbers, out of range, or no certificate.
    """
    if not asked:
        return certificate.thresholds if certificate else NEVER
    if list(asked) == [CALIBRATED]:
        if certificate is None:
            raise DecodeError(
                "threshold is 'calibrated', but the checkpoint has no certificate; run `eeplan calibrate`"
            )
        return certificate.thresholds
    try:
        numbers = tuple(map(float, asked))
    except ValueError:
        wrong = " ".join(asked)
        raise DecodeError(
            f"threshold is '{wrong}'; expected numbers from 0 to 1, or 'calibrated' alone"
        ) from None
    return exit_policy(numbers).thresholds


def thresholds_sentence(thresholds: Sequence[float], certificate: Certificate | None) -> str:
    """What the thresholds are and where they come from, for people."""
    listed = ", ".join(f"{one:g}" for one in thresholds)
    if certificate is not None and tuple(thresholds) == certificate.thresholds:
        return f"threshold {listed}, calibrated: {certificate.statement}"
    if certificate is None and tuple(thresholds) == NEVER:
        return "threshold 1, nothing leaves early; `eeplan calibrate` finds a lower one"
    return f"threshold {listed}, not calibrated"
