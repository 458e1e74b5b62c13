"""The words of the training command in a launch script, without running it.

Covered: assignments, arrays and ``+=``, quotes, continued lines, comments, ``$X``, ``${X}``, ``${X:-word}``,
``${X[@]}`` and ``$(( ))`` of whole numbers. What a script can only know when it runs (positional parameters,
other commands' output, the branch of an ``if``) stays as it is written; the names are reported.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from eeplan.errors import SchemaError

_ASSIGNMENT = re.compile(
    r"\s*(?:(?:export|local|readonly|declare(?:\s+-\w+)*)\s+)?([A-Za-z_]\w*)(\+?)=(.*)\Z", re.S
)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>\w+|@|\*)(?:\[[@*]\])?(?::?-(?P<default>[^{}]*))?\}"
    r"|\$(?P<bare>[A-Za-z_]\w*|[0-9@*])"
)
_QUOTED_ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
"""``"${X[@]}"`` is as many words as the array has."""
_REDIRECTION = re.compile(r"\|\|?|&&?|[0-9&]?>{1,2}.*|<.*")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # Division of the shell cuts towards zero; scripts divide positive numbers.
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST_EXPANSIONS = 20
"""Values may hold references themselves; a value that refers to itself would never end."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command split into words."""

    launcher: tuple[str, ...]
    """Before the program: torchrun and its own flags; empty in a bare list of flags."""
    program: str
    """The Python file; empty in a bare list of flags."""
    arguments: tuple[str, ...]
    undefined: tuple[str, ...]
    """Names in it that have no value in the script."""


@dataclass(slots=True)
class _Shell:
    variables: dict[str, str]
    undefined: dict[str, None] = field(default_factory=dict)

    def expand(self, text: str) -> str:
        for _ in range(_MOST_EXPANSIONS):
            expanded = _EXPANSION.sub(self._replaced, text)
            if expanded == text:
                break
            text = expanded
        return text

    def _replaced(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            value = self._calculated(match["sum"])
            return match[0] if value is None else str(value)
        name = match["braced"] or match["bare"]
        if name in self.variables:
            return self.variables[name]
        if match["default"] is not None:
            return match["default"]
        return match[0]

    def _calculated(self, text: str) -> int | None:
        # Inside $(( )) a bare name is a variable, too.
        text = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: self.variables.get(m[0], m[0]), self.expand(text))
        try:
            return _value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def launch_command(text: str, where: str, defined: Mapping[str, str] | None = None) -> Command:
    """Find the training command: the last one that runs a Python file with flags, or a bare list of flags.

    Args:
        text: of a shell script, or flags alone.
        where: names the script in errors.
        defined: values of variables that the script does not set, or is to be overruled in.

    Raises:
        SchemaError: no such command, or quotes that do not close.
    """
    given = dict(defined or {})
    shell = _Shell(given.copy())
    commands: list[list[str]] = []
    for statement in _statements(text):
        rest = _assign(statement, shell, given, where)
        if rest.strip():
            words = _words(shell.expand(_QUOTED_ARRAY.sub(r"\1", rest)), where)
            commands.append(list(takewhile(lambda word: not _REDIRECTION.fullmatch(word), words)))
    runs = [words for words in commands if _program_at(words) is not None and _has_flags(words)]
    # A list of flags may be spread over lines without any sign of continuation.
    words = runs[-1] if runs else [word for words in commands if _has_flags(words) for word in words]
    if not words:
        raise SchemaError(f"{where}: no command with flags such as --num-layers; expected a launch script")
    at = _program_at(words)
    undefined = {match[0]: None for word in words for match in _EXPANSION.finditer(word)}
    if at is None:
        return Command((), "", tuple(words), tuple(undefined))
    return Command(tuple(words[:at]), words[at], tuple(words[at + 1 :]), tuple(undefined))


def _statements(text: str) -> Iterator[str]:
    """Split at newlines and semicolons outside quotes and brackets, without comments."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    statement, quote, depth = "", "", 0
    characters = iter(text)
    for character in characters:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (not statement or statement[-1].isspace() or statement[-1] == "("):
            for character in characters:
                if character == "\n":
                    break
            character = "\n"
        if not quote:
            depth += (character == "(") - (character == ")")
            if character in "\n;" and depth <= 0:
                yield statement
                statement, depth = "", 0
                continue
        statement += character
    yield statement


def _assign(statement: str, shell: _Shell, given: Mapping[str, str], where: str) -> str:
    """Carry out an assignment; what is left is a command."""
    match = _ASSIGNMENT.match(statement)
    if not match:
        return statement
    name, appends, value = match[1], bool(match[2]), match[3]
    if value.startswith("("):
        value, rest = " ".join(_quoted(value[1 : value.rfind(")")], shell, where)), ""
    else:
        value, rest = _first_word(value, shell)
    if name not in given:
        shell.variables[name] = f"{shell.variables.get(name, '')} {value}" if appends else value
    return rest


def _quoted(text: str, shell: _Shell, where: str) -> list[str]:
    return [shlex.quote(word) for word in _words(shell.expand(_QUOTED_ARRAY.sub(r"\1", text)), where)]


def _first_word(text: str, shell: _Shell) -> tuple[str, str]:
    """The value of an assignment and what follows it, as in ``X=1 torchrun …``."""
    quote = ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character.isspace() and text.count("(", 0, index) == text.count(")", 0, index):
            return _unquoted(text[:index], shell), text[index:]
    return _unquoted(text, shell), ""


def _unquoted(text: str, shell: _Shell) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1]
    return shell.expand(text.replace('"', ""))


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError as error:
        raise SchemaError(f"{where}: {str(error).lower()} in: {' '.join(text.split())[:60]}") from None


def _program_at(words: list[str]) -> int | None:
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def _has_flags(words: list[str]) -> bool:
    return any(word.startswith("--") for word in words)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("not a sum of whole numbers")
