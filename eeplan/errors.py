"""Errors that a user can act on.

Every exception here carries one line: what is wrong, where, what was expected and what to do. The command
line prints it as ``eeplan: error: …`` and exits with code 2; ``details``, if any, follow on lines of their
own. Bugs of our own are plain exceptions and keep their traceback.
"""

from __future__ import annotations

from typing import Any


class EeplanError(Exception):
    """Base of all errors that are the input's or the machine's fault, not eeplan's."""

    details: tuple[str, ...] = ()
    """Further lines for people."""


class FileError(EeplanError):
    """A file is missing, unreadable, or not what its name says."""


class SchemaError(EeplanError):
    """A run, profile or plan file breaks its schema; the message names the key path."""


class SpecError(EeplanError):
    """A run file is well-formed but impossible (heads not divisible, exit outside the model, …)."""


class ProfileError(EeplanError):
    """A profile does not belong to the run, or lacks an op that the plan needs."""


class PlanInfeasible(EeplanError):
    """No plan satisfies the limits; the message names the limit, the stage and the numbers."""

    remedies: tuple[dict[str, Any], ...] = ()
    """Single changes of the run file that help, least loss of time first: what to say, keys, numbers."""


class PlanError(EeplanError):
    """A plan file was edited, or does not match what it is used with."""


class ScheduleError(EeplanError):
    """A schedule breaks one of the validators: missing input, wrong label, deadlock, wrong count."""


class DataError(EeplanError):
    """Training data or a tokenizer is missing, corrupt, or does not fit the model."""


class CheckpointError(EeplanError):
    """A checkpoint is missing, damaged, or belongs to another plan."""


class TrainingError(EeplanError):
    """Training cannot go on: a loss or gradient is not finite."""


class Preempted(EeplanError):
    """Training was asked to stop by a signal, has saved, and goes on when started again."""

    exit_code = 75
    """EX_TEMPFAIL: what a scheduler takes as "start it again"."""


class LaunchError(EeplanError):
    """Processes could not be started, or one of them died."""


class DecodeError(EeplanError):
    """A prompt or a decoding option is impossible for this model."""
