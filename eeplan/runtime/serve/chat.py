"""From the messages of a conversation to a prompt: the tokenizer's own template, or plain turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eeplan.errors import DataError

ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
"""Roles that plain turns know, and how they call them."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How messages become a prompt."""

    source: str | None
    """A Jinja template, as tokenizers bring it; None for plain turns."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Where plain turns end an answer: as the user begins to speak."""
        return () if self.source else ("\nUser:",)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the assistant continues.

        Args:
            messages: each {"role", "content"}, at least one.

        Raises:
            DataError: the template refuses the messages, or a role is unknown.
        """
        return self._plain(messages) if self.source is None else self._rendered(self.source, messages)

    def _plain(self, messages: Sequence[Mapping[str, str]]) -> str:
        lines = []
        for message in messages:
            role = ROLES.get(message["role"])
            if role is None:
                raise DataError(f"role is '{message['role']}'; expected one of {', '.join(ROLES)}")
            lines.append(f"{role}: {message['content']}")
        return "\n".join([*lines, "Assistant:"])

    def _rendered(self, source: str, messages: Sequence[Mapping[str, str]]) -> str:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(source)
            return template.render(
                messages=[dict(one) for one in messages],
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(f"the tokenizer's chat template refuses these messages: {error}") from None


def chat_template(tokenizer_file: Path) -> ChatTemplate:
    """The template that a tokenizer file brings under ``chat_template``, else plain turns.

    Raises:
        DataError: not readable, or its template is no text.
    """
    try:
        document: Any = json.loads(tokenizer_file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer file {tokenizer_file} cannot be read ({error})") from None
    source = document.get("chat_template") if isinstance(document, dict) else None
    if source is not None and not isinstance(source, str):
        raise DataError(f"tokenizer file {tokenizer_file}: its chat_template is no text")
    return ChatTemplate(source)
