"""Reads the directory that ``eeplan train`` leaves, and refuses what a report cannot be made of.

Only reading and checking happen here; comparing with the prediction is ``report.compare``.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from eeplan.errors import FileError, PlanError
from eeplan.files import read_bytes
from eeplan.plan import Plan, load_plan
from eeplan.profile import DeviceFingerprint, OpProfile, load_profile
from eeplan.report.evaluations import (
    DECODE_BENCH,
    EVALUATION,
    USAGE,
    DecodeBench,
    Evaluation,
    read_decode_bench,
    read_evaluation,
)
from eeplan.schema import Model, validate
from eeplan.timeline import Timeline
from eeplan.usage import ExitUsage, load_usage

Bytes = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0)]
PositiveSeconds = Annotated[float, Field(gt=0.0)]


class _Record(Model):
    """A line or file written by training. Keys that the report does not use are left alone."""

    model_config = ConfigDict(extra="ignore")


class MeasuredExit(_Record):
    """One early exit inside the ops of its stage, for one microbatch."""

    stage: Annotated[int, Field(ge=0)]
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0


class Measured(_Record):
    """``measured.json``: medians over the timed iterations, peaks per stage, and where it ran."""

    iteration_time_s: PositiveSeconds
    iterations_timed: PositiveInt
    iteration_times_s: Annotated[tuple[PositiveSeconds, ...], Field(min_length=1)]
    pipeline_s: Seconds
    grad_sync_s: Seconds
    optimizer_s: Seconds
    overhead_s: float
    """Remainder of an iteration; a median of differences, so it can fall slightly below zero."""
    peak_bytes: tuple[Bytes, ...]
    process_peak_bytes: tuple[Bytes, ...]
    exits: dict[str, MeasuredExit] = Field(default_factory=dict)
    """By name (``exit_<depth>``); empty where they were not timed."""
    core_share: tuple[Fraction, ...] | None = None
    """Share of its ops' time that each stage had a core to itself; None where that cannot be told."""
    wall_s: Seconds
    device: DeviceFingerprint
    threads: PositiveInt
    software: dict[str, str] = Field(default_factory=dict)


class TrainRecord(_Record):
    """One training iteration. A diverged loss is kept as NaN or infinity and shown as such."""

    model_config = ConfigDict(allow_inf_nan=True)
    iteration: PositiveInt
    losses: dict[str, float]
    iteration_time_s: PositiveSeconds


class ValidationRecord(_Record):
    """Losses on held-out text after ``iteration`` iterations."""

    model_config = ConfigDict(allow_inf_nan=True)
    iteration: Annotated[int, Field(ge=0)]
    losses: dict[str, float]


class _Reference(_Record):
    unigram_entropy_nats: PositiveSeconds


class SampleToken(_Record):
    """One generated token and the exit that emitted it (``exit_<depth>`` or ``final``)."""

    text: str
    exit: str
    confidence: float


class Sample(_Record):
    """A generated continuation."""

    prompt: str
    threshold: float
    tokens: tuple[SampleToken, ...]
    tokens_per_s: float | None = None


class _RecordedIteration(_Record):
    iteration: PositiveInt
    timeline: dict[str, Any]


class _Timelines(_Record):
    iterations: Annotated[tuple[_RecordedIteration, ...], Field(min_length=1)]


class _Samples(_Record):
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything that a report is made of."""

    path: Path
    plan: Plan
    profile: OpProfile | None
    measured: Measured
    train: tuple[TrainRecord, ...]
    validation: tuple[ValidationRecord, ...]
    unigram_entropy_nats: float | None
    timelines: tuple[tuple[int, Timeline], ...]
    """(iteration, measured timeline) of every recorded iteration."""
    samples: tuple[Sample, ...]
    evaluation: Evaluation | None
    """What the exits are worth on held-out text, and how often tokens leave; None without exits."""
    usage: ExitUsage | None
    """The same in the form that `eeplan plan --usage` reads."""
    usage_sha256: str | None
    decode_bench: DecodeBench | None
    """Speed of the decoding modes on the checkpoint, where it was measured."""

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses in order of depth: ``exit_<depth>`` …, then ``final``."""
        return loss_names(self.plan)

    @property
    def median_iteration(self) -> tuple[int, Timeline, float]:
        """The recorded iteration whose time is the median of the recorded ones (lower one of two).

        Returns:
            Iteration number, its timeline, and its duration in seconds as logged by training.
        """
        duration = {record.iteration: record.iteration_time_s for record in self.train}
        known = [(duration[number], number, timeline) for number, timeline in self.timelines]
        middle = statistics.median_low([seconds for seconds, _, _ in known])
        seconds, number, timeline = next(entry for entry in known if entry[0] == middle)
        return number, timeline, seconds


def loss_names(plan: Plan) -> tuple[str, ...]:
    """Names that training gives to the losses of ``plan``, shallowest first."""
    return (*(f"exit_{e.depth}" for e in sorted(plan.exits, key=lambda e: e.depth)), "final")


def read_run(path: Path) -> RunData:
    """Read and check a run directory.

    Raises:
        FileError: the directory or a needed file is missing, or says something else than the plan does.
        SchemaError: a file breaks its format; the message names the key path. PlanError: the plan was edited.
    """
    if not path.is_dir():
        raise FileError(
            f"run directory {path} does not exist; give the folder that `eeplan train PLAN --out DIR` wrote"
        )
    if not (path / "plan.yaml").exists():
        raise FileError(
            f"{path} is no run directory: it has no plan.yaml; give the folder that `eeplan train` wrote"
        )
    plan = load_plan(path / "plan.yaml")
    for name in ("measured.json", "metrics.jsonl", "timelines.json"):
        if not (path / name).exists():
            raise FileError(
                f"{path} has no {name}: training has not finished; run `eeplan train PLAN --out {path}` "
                "to its end, then report again"
            )
    measured = validate(_json(path / "measured.json"), Measured, f"measured file {path / 'measured.json'}")
    train, validation, entropy = _read_metrics(path / "metrics.jsonl", plan)
    timelines = _read_timelines(path / "timelines.json", plan, {record.iteration for record in train})
    _check_stages(path / "measured.json", plan, measured)
    usage, digest = load_usage(path / USAGE) if (path / USAGE).exists() else (None, None)
    return RunData(
        path=path,
        plan=plan,
        profile=_read_profile(path / "profile.yaml", plan),
        measured=measured,
        train=train,
        validation=validation,
        unigram_entropy_nats=entropy,
        timelines=timelines,
        samples=_read_samples(path / "samples.json", plan),
        evaluation=read_evaluation(path / EVALUATION, loss_names(plan)),
        usage=usage,
        usage_sha256=digest,
        decode_bench=read_decode_bench(path / DECODE_BENCH),
    )


def _json(path: Path) -> Any:
    raw = read_bytes(path, "file")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise FileError(f"{path} is not JSON ({error}); train again, the file is damaged") from None


def _check_stages(path: Path, plan: Plan, measured: Measured) -> None:
    stages = len(plan.stages)
    for key, values in (
        ("peak_bytes", measured.peak_bytes),
        ("process_peak_bytes", measured.process_peak_bytes),
    ):
        if len(values) != stages:
            raise FileError(
                f"{path}: {key} has {len(values)} entries, the plan has {stages} stages; "
                "the files are of different runs, train again"
            )
    if any(peak == 0 for peak in measured.peak_bytes):
        raise FileError(f"{path}: peak_bytes is 0 on a stage; memory was not recorded, train again")


RecordT = TypeVar("RecordT", TrainRecord, ValidationRecord)


def _read_metrics(
    path: Path, plan: Plan
) -> tuple[tuple[TrainRecord, ...], tuple[ValidationRecord, ...], float | None]:
    train: list[TrainRecord] = []
    validation: list[ValidationRecord] = []
    entropy: float | None = None
    expected = set(loss_names(plan))

    def checked(document: Any, schema: type[RecordT], where: str) -> RecordT:
        record = validate(document, schema, where)
        if set(record.losses) != expected:
            raise FileError(
                f"{where}: losses are {sorted(record.losses)}, the plan's exits give {sorted(expected)}; "
                "the files are of different runs, train again"
            )
        return record

    for number, line in enumerate(read_bytes(path, "metrics file").splitlines(), start=1):
        where = f"metrics file {path}, line {number}"
        try:
            document = json.loads(line)
        except ValueError:
            raise FileError(f"{where}: not a JSON object; train again, the file is damaged") from None
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind == "train":
            train.append(checked(document, TrainRecord, where))
        elif kind == "validation":
            validation.append(checked(document, ValidationRecord, where))
        elif kind == "reference":
            entropy = validate(document, _Reference, where).unigram_entropy_nats
    if not train:
        raise FileError(f"metrics file {path} has no line of kind 'train'; train for at least one iteration")
    return tuple(train), tuple(validation), entropy


def _read_timelines(path: Path, plan: Plan, logged: set[int]) -> tuple[tuple[int, Timeline], ...]:
    recorded = validate(_json(path), _Timelines, f"timelines file {path}").iterations
    adapter = TypeAdapter(Timeline)
    timelines = []
    for entry in recorded:
        where = f"timelines file {path}, iteration {entry.iteration}"
        try:
            timeline = adapter.validate_python(entry.timeline)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            at = ".".join(str(part) for part in problem["loc"])
            raise FileError(f"{where}: {at}: {problem['msg'].lower()}; train again") from None
        if timeline.num_stages != len(plan.stages):
            raise FileError(
                f"{where}: has {timeline.num_stages} stages, the plan has {len(plan.stages)}; "
                "the files are of different runs, train again"
            )
        if entry.iteration not in logged:
            raise FileError(f"{where}: metrics.jsonl has no such iteration; train again")
        timelines.append((entry.iteration, timeline))
    return tuple(timelines)


def _read_profile(path: Path, plan: Plan) -> OpProfile | None:
    if not path.exists():
        return None
    profile, digest = load_profile(path)
    if digest != plan.profile_sha256:
        raise PlanError(
            f"profile {path} is not the one that the plan was made from (hash {digest[:12]}…, the plan "
            f"says {plan.profile_sha256[:12]}…); remove it or put the right one there"
        )
    return profile


def _read_samples(path: Path, plan: Plan) -> tuple[Sample, ...]:
    if not path.exists():
        return ()
    samples = validate({"samples": _json(path)}, _Samples, f"samples file {path}").samples
    known = set(loss_names(plan))
    for sample in samples:
        for token in sample.tokens:
            if token.exit not in known:
                raise FileError(
                    f"samples file {path}: a token left at '{token.exit}', the plan has {sorted(known)}; "
                    "generate again with this run's checkpoint"
                )
    return samples
