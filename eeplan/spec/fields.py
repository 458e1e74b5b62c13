"""Field types and checks that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Fraction = Annotated[float, Field(ge=0.0)]


def require_divides(name: str, value: int, by_name: str, by: int) -> None:
    """Refuse a size that does not split evenly.

    Raises:
        ValueError: ``by`` does not divide ``value``; says so under the two names.
    """
    if value % by:
        raise ValueError(f"{name} {value} is not divisible by {by_name} {by}; change one of them")
