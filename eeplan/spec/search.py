"""What the planner may choose beyond exits, layers and fill."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveInt, model_validator

from eeplan.schema import Model


class SearchSpec(Model):
    """Values that the planner may choose from; an empty list leaves the run's own value.

    Every combination is judged. ``data_parallel_size`` follows, so that the number of processes stays what
    ``parallel`` says, and ``global_batch_size`` stays, too: all combinations train on the same batches.
    """

    pipeline_model_parallel_size: tuple[PositiveInt, ...] = ()
    micro_batch_size: tuple[PositiveInt, ...] = ()

    @model_validator(mode="after")
    def _each_value_once(self) -> Self:
        for name, values in (
            ("pipeline_model_parallel_size", self.pipeline_model_parallel_size),
            ("micro_batch_size", self.micro_batch_size),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"search.{name} {list(values)} names a value twice; keep one")
        return self

    @property
    def is_open(self) -> bool:
        """Whether anything is left to the planner."""
        return bool(self.pipeline_model_parallel_size or self.micro_batch_size)
