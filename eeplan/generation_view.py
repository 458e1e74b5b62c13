"""A generation as people see it: text coloured by exit, token by token, and a line about what it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

FINAL = "final"
EXIT_STYLES = ("cyan", "green", "yellow", "magenta", "blue")


class GenerationView:
    """A generation as it comes: each token in the colour of the exit that emitted it; plain in plain text.

    On a terminal tokens appear one by one, elsewhere the text is printed at once, since nobody watches.
    """

    def __init__(self, prompt: str, stream: TextIO) -> None:
        self._stream, self._prompt = stream, prompt
        self._console: Console | None = None
        self._began = False
        self._styles: dict[str, str] = {FINAL: "default"}
        if stream.isatty():
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)

    def token(self, token: Mapping[str, Any]) -> None:
        """Show one token."""
        if self._console is None:
            return
        if not self._began:
            # Not before, so that an error leaves nothing on the screen but its line.
            self._write(self._prompt, "bold")
            self._began = True
        self._write(token["text"], self._style(token["exit"]))

    def finish(self, result: Mapping[str, Any]) -> None:
        """What the generation took, after its last token."""
        if self._console is None:
            print(self._prompt + result["text"], file=self._stream)
        self._write("\n\ntokens by exit: " if self._console else "\ntokens by exit: ", "")
        used = [(name, count) for name, count in result["exits"].items() if count]
        for index, (name, count) in enumerate(used):
            self._write((", " if index else "") + f"{name} {count}", self._style(name))
        self.summary(result)

    def summary(self, result: Mapping[str, Any]) -> None:
        """One line on mode and speed."""
        drafts = result["drafts"]
        said = f"; {drafts['accepted']} of {drafts['drafted']} drafts accepted" if drafts else ""
        said += _shortlist(result.get("candidates"))
        if "full" in result:
            full = result["full"]
            said += f"; {full['speed_up']:.2f} times as fast as the full model"
            said += f", {full['agreement']:.0%} of the tokens the same"
        summary = f"{result['tokens_per_s']:.1f} tokens/s, mean depth {result['mean_depth']:.2f}{said}"
        self._write(f"\nmode {result['mode']}: {summary}\n", "")

    def _style(self, name: str) -> str:
        """Of an exit, in the order in which they show up."""
        return self._styles.setdefault(name, EXIT_STYLES[(len(self._styles) - 1) % len(EXIT_STYLES)])

    def _write(self, text: str, style: str) -> None:
        if self._console is None:
            self._stream.write(text)
            return
        from rich.text import Text

        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._stream.flush()


def _shortlist(found: Mapping[str, Any] | None) -> str:
    """What candidates saved and, if that was measured, how often they held a token back wrongly."""
    if found is None:
        return ""
    if not found["shortlists"]:
        return f"; no exit had the {found['number']} candidates to look at"
    said = f"; {found['number']} candidates ended {found['refused']} of {found['shortlists']} checks"
    if found["wrong"] is not None:
        said += f", {found['wrong']} of these wrongly ({found['wrong_share']:.1%})"
    return said
