"""The training text."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, Tag, model_validator

from eeplan.schema import Model


class WeightedData(Model):
    """One of several datasets, and its share of the samples."""

    path: str
    """Prefix of the .bin/.idx pair, relative to the file that names it."""
    weight: PositiveFloat
    """Share of the samples in relation to the other datasets' weights."""


def _known_path(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no data; expected a prefix, or a list of {{path: …, weight: …}}")
    return value


DataPath = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[str, BeforeValidator(_known_path), Tag("[prefix]")]
    | Annotated[tuple[WeightedData, ...], Field(min_length=1), Tag("[blend]")],
    Discriminator(lambda value: "[blend]" if isinstance(value, list | tuple) else "[prefix]"),
]


class DataSpec(Model):
    """Training text, as built by ``eeplan data build``."""

    data_path: DataPath
    """Prefix of the .bin/.idx pair, relative to the file that names it; or several with their weights."""
    tokenizer: str
    """Tokenizer file written next to the data, relative to the file that names it; the same for all data."""
    split: str = "95,5,0"
    """Relative sizes of train, validation and test parts, of each dataset."""

    @property
    def datasets(self) -> tuple[WeightedData, ...]:
        """Every dataset with its share; the shares add up to 1."""
        if isinstance(self.data_path, str):
            return (WeightedData(path=self.data_path, weight=1.0),)
        whole = sum(one.weight for one in self.data_path)
        return tuple(WeightedData(path=one.path, weight=one.weight / whole) for one in self.data_path)

    def with_paths(self, change: Callable[[str], Any]) -> DataSpec:
        """The same with ``change`` applied to every path."""
        data_path: Any = (
            change(self.data_path)
            if isinstance(self.data_path, str)
            else tuple(one.model_copy(update={"path": change(one.path)}) for one in self.data_path)
        )
        return self.model_copy(update={"data_path": data_path, "tokenizer": change(self.tokenizer)})

    @model_validator(mode="after")
    def _split_is_three_numbers(self) -> Self:
        try:
            parts = [float(part) for part in self.split.split(",")]
        except ValueError:
            parts = []
        # Written so that nan, of which no comparison holds, is refused.
        if len(parts) != 3 or not (parts[0] > 0 and min(parts) >= 0 and sum(parts) < inf):
            raise ValueError(
                f"split is {self.split!r}; expected three numbers 'train,valid,test' with a positive first"
            )
        return self

    @model_validator(mode="after")
    def _each_dataset_once(self) -> Self:
        paths = [one.path for one in self.datasets]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"data_path names {path} twice; name it once, with the sum of the weights")
        if not sum(one.weight for one in self.datasets) < inf:
            raise ValueError("the weights of data_path add up to infinity; lower them")
        return self
