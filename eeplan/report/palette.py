"""Colours shared by figures and page. Knows neither matplotlib nor HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

INK, MUTED, RULE, PAPER = "#1d1c1a", "#6a6862", "#d8d5ce", "#fdfcfa"
SOLID = "#57554f"
"""Neutral for what is measured and has no hue of its own."""
ON_BAR = "#101418"
"""Text on a coloured bar, in light and dark alike."""

LIGHT: Mapping[str, str] = MappingProxyType(
    {"ink": INK, "muted": MUTED, "rule": RULE, "paper": PAPER, "solid": SOLID}
)
DARK: Mapping[str, str] = MappingProxyType(
    {"ink": "#ebe8e1", "muted": "#a09c93", "rule": "#3a3935", "paper": "#171715", "solid": "#b3aea4"}
)

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
SLATE = "#8795a1"

KIND_COLOURS: Mapping[str, str] = MappingProxyType(
    {"forward": SKY, "backward": ORANGE, "grad_sync": GREEN, "optimizer": PURPLE}
)
KIND_NAMES: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "backward": "backward", "grad_sync": "gradient sync", "optimizer": "optimizer"}
)
PART_COLOURS: Mapping[str, str] = MappingProxyType(
    {"pipeline": SLATE, "gradient sync": GREEN, "optimizer": PURPLE, "overhead": YELLOW}
)
PHASE_COLOURS: Mapping[str, str] = MappingProxyType({"warm-up": SKY, "steady": VERMILLION, "cool-down": BLUE})
MEMORY_COLOURS: Mapping[str, str] = MappingProxyType({"state": BLUE, "activations": SKY, "transient": GREEN})
EXIT_COLOURS = (ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLUE)


def exit_colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per loss name, shallowest first; the final exit is plain ink.

    Beyond six early exits the hues repeat; the labels tell them apart.
    """
    early = {name: EXIT_COLOURS[i % len(EXIT_COLOURS)] for i, name in enumerate(names[:-1])}
    return {**early, names[-1]: INK}
