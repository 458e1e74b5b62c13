"""The whole run file, and what must hold between its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from eeplan.errors import SpecError
from eeplan.schema import Model, load_yaml, validate
from eeplan.spec.data import DataSpec
from eeplan.spec.decode import DecodeSpec
from eeplan.spec.exits import ExitsSpec
from eeplan.spec.fields import require_divides
from eeplan.spec.fill import FillCounts, FillSpec
from eeplan.spec.limits import LimitsSpec
from eeplan.spec.model import ModelSpec
from eeplan.spec.parallel import ParallelSpec
from eeplan.spec.search import SearchSpec
from eeplan.spec.training import TrainingSpec


class RunSpec(Model):
    """The whole run file."""

    schema_version: Literal[1]
    name: str = "run"
    model: ModelSpec
    parallel: ParallelSpec = ParallelSpec()
    training: TrainingSpec
    data: DataSpec
    exits: ExitsSpec = ExitsSpec()
    decode: DecodeSpec = DecodeSpec()
    fill: FillSpec = FillSpec()
    limits: LimitsSpec = LimitsSpec()
    search: SearchSpec = SearchSpec()

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration and data-parallel rank (M)."""
        per_step = self.training.micro_batch_size * self.parallel.data_parallel_size
        return self.training.global_batch_size // per_step

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank gets an equal, aligned share."""
        unit = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-self.model.vocab_size // unit) * unit

    @model_validator(mode="after")
    def _layout_is_possible(self) -> Self:
        model, parallel, training = self.model, self.parallel, self.training
        tp = parallel.tensor_model_parallel_size
        require_divides(
            "model.num_attention_heads", model.num_attention_heads, "parallel.tensor_model_parallel_size", tp
        )
        require_divides(
            "model.num_query_groups", model.query_groups, "parallel.tensor_model_parallel_size", tp
        )
        require_divides("model.ffn_hidden_size", model.ffn_size, "parallel.tensor_model_parallel_size", tp)
        self._check_split()
        if parallel.sequence_parallel:
            self._check_sequence_parallel()
        require_divides(
            "training.global_batch_size",
            training.global_batch_size,
            "micro_batch_size x data_parallel_size",
            training.micro_batch_size * parallel.data_parallel_size,
        )
        if training.lr_warmup_iters > training.train_iters:
            raise ValueError(
                f"training.lr_warmup_iters is {training.lr_warmup_iters}, more than train_iters "
                f"{training.train_iters}; lower it"
            )
        if training.min_lr > training.lr:
            raise ValueError(f"training.min_lr {training.min_lr} exceeds training.lr {training.lr}; lower it")
        self._check_exits()
        self._check_distillation()
        self._check_fill()
        return self

    def _check_sequence_parallel(self) -> None:
        tp = self.parallel.tensor_model_parallel_size
        if tp == 1:
            raise ValueError(
                "parallel.sequence_parallel divides the sequence over tensor-parallel ranks; set "
                "parallel.tensor_model_parallel_size to 2 or more, or leave it out"
            )
        require_divides(
            "training.seq_length", self.training.seq_length, "parallel.tensor_model_parallel_size", tp
        )

    def _check_fill(self) -> None:
        if not isinstance(self.fill.policy, FillCounts):
            return
        stages = self.parallel.pipeline_model_parallel_size
        for name, count in (("warmup", self.fill.policy.warmup), ("cooldown", self.fill.policy.cooldown)):
            if count >= stages:
                raise ValueError(
                    f"fill.policy.{name} is {count}; {stages} pipeline stages take at most {stages - 1}"
                )
        together = self.fill.policy.warmup + self.fill.policy.cooldown
        if self.fill.mode == "same_count" and together >= self.num_microbatches:
            raise ValueError(
                f"fill.policy turns {together} of {self.num_microbatches} microbatches into partial ones; "
                "leave a full one, or take mode: added"
            )

    def _check_split(self) -> None:
        layers, stages = self.model.num_layers, self.parallel.pipeline_model_parallel_size
        split = self.parallel.layer_split
        if split == "uniform" and layers % stages:
            raise ValueError(
                f"model.num_layers {layers} is not divisible by parallel.pipeline_model_parallel_size "
                f"{stages}; change one of them, or set parallel.layer_split to auto or to layers per stage"
            )
        if layers < stages:
            raise ValueError(
                f"model.num_layers {layers} is less than parallel.pipeline_model_parallel_size {stages}; "
                "every stage needs a layer"
            )
        if isinstance(split, tuple) and (len(split) != stages or sum(split) != layers):
            raise ValueError(
                f"parallel.layer_split {list(split)} gives {len(split)} stages {sum(split)} layers together; "
                f"expected {stages} numbers that add up to num_layers {layers}"
            )

    def _check_distillation(self) -> None:
        if self.exits.distillation is None or self.parallel.pipeline_model_parallel_size == 1:
            return
        if self.exits.untie_exit_output_weights or any(one.tied is False for one in self.exits.layers):
            raise ValueError(
                "exits.distillation needs the final exit's vocabulary matrix on the stage of every exit; tie "
                "the exits to it, or set parallel.pipeline_model_parallel_size to 1"
            )
        if self.fill.policy != "none":
            raise ValueError(
                "exits.distillation cannot teach the partial microbatches of fill, which never reach the "
                "final exit; set fill.policy to none"
            )

    def _check_exits(self) -> None:
        layers = self.model.num_layers
        for index, request in enumerate(self.exits.layers):
            where = f"exits.layers[{index}]: exit {request.boundary} layer {request.layer}"
            if request.layer > layers:
                raise ValueError(f"{where} is outside the model; layers are 1 to {layers}")
            if request.depth == layers:
                raise ValueError(f"{where} is the final exit itself; choose an earlier layer")
            if request.depth == 0:
                raise ValueError(f"{where} has no layer below it; choose a later one")
        if isinstance(self.exits.count, int) and self.exits.count > layers - 1:
            raise ValueError(
                f"exits.count is {self.exits.count}; a model of {layers} layers has room for "
                f"{layers - 1} early exits"
            )


def load_run(path: Path) -> tuple[RunSpec, str]:
    """Read a run file; paths inside become absolute, taken relative to the file's own folder.

    Returns:
        The run and the SHA-256 of the file.

    Raises:
        FileError, SchemaError.
    """
    run, digest = load_yaml(path, RunSpec, "run file")
    return with_data_paths(run, lambda p: str((path.parent / p).resolve())), digest


def with_data_paths(run: RunSpec, change: Any) -> RunSpec:
    """The same run with ``change`` applied to its data and tokenizer paths."""
    return run.model_copy(update={"data": run.data.with_paths(change)})


def replace_keys(run: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """A run with dotted keys replaced, e.g. ``{"training.train_iters": 5}``, validated again.

    Raises:
        SpecError: unknown key. SchemaError: the changed run is impossible.
    """
    document = run.model_dump(mode="json")
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        node: Any = document
        for parent in parents:
            node = node.get(parent)
            if not isinstance(node, dict):
                raise SpecError(f"no key '{dotted}' in a run file")
        if last not in node:
            raise SpecError(f"no key '{dotted}' in a run file")
        node[last] = value
    return validate(document, RunSpec, "run")
