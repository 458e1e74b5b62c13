"""The training text."""

from __future__ import annotations

from math import inf
from typing import Self

from pydantic import model_validator

from eeplan.schema import Model


class DataSpec(Model):
    """Training text, as built by ``eeplan data build``."""

    data_path: str
    """Prefix of the .bin/.idx pair, relative to the file that names it."""
    tokenizer: str
    """Tokenizer file written next to the data, relative to the file that names it."""
    split: str = "95,5,0"
    """Relative sizes of train, validation and test parts."""

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
