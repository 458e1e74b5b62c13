"""The flags of a training command, ticked off as they are read, so that none goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eeplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class Unread:
    """A flag that did not find its way into the run."""

    flag: str
    values: tuple[str, ...]
    why: str

    @property
    def text(self) -> str:
        """The flag with its values."""
        return " ".join([self.flag, *self.values])


@dataclass(slots=True)
class FlagReader:
    """Flags of a script, ticked off as they are used."""

    flags: dict[str, tuple[str, ...]]
    where: str
    unread: list[Unread] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def take(self, flag: str) -> tuple[str, ...] | None:
        """Values of ``flag``, which is then done with; None when it is not given."""
        return self.flags.pop(flag, None)

    def switch(self, flag: str) -> bool:
        """Whether a flag without values is given."""
        return self.take(flag) is not None

    def one(self, flag: str) -> str | None:
        """The single value of ``flag``.

        Raises:
            SpecError: several values, or none.
        """
        values = self.take(flag)
        if values is None:
            return None
        if len(values) != 1:
            raise SpecError(f"{self.where}: {flag} has {len(values)} values; expected one")
        return values[0]

    def number(self, flag: str, kind: Callable[[str], Any]) -> Any:
        """The single value of ``flag`` as a number; None when it is not given."""
        text = self.one(flag)
        return None if text is None else self.parsed(flag, text, kind)

    def parsed(self, flag: str, text: str, kind: Callable[[str], Any]) -> Any:
        """A number out of a script.

        Raises:
            SpecError: it is none, for example because its variable has no value.
        """
        try:
            return kind(text)
        except ValueError:
            remedy = "; give the variable a value with --define NAME=VALUE" if "$" in text else ""
            raise SpecError(f"{self.where}: {flag} is {text!r}; expected a number{remedy}") from None


def flags_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flags with their values; the last of equal ones counts, as in argparse."""
    flags: dict[str, tuple[str, ...]] = {}
    current: str | None = None
    for word in words:
        if word.startswith("--"):
            current, equals, value = word.partition("=")
            flags[current] = (value,) if equals else ()
        elif current is not None:
            flags[current] += (word,)
    return flags
