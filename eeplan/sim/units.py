"""What the run file and the profile call things, in the simulator's words."""

from __future__ import annotations

from eeplan.profile import OpName
from eeplan.spec import HeadKind

EXIT_OPS: dict[HeadKind, OpName] = {
    "minimal": "exit_minimal",
    "norm": "exit_norm",
    "mlp": "exit_mlp",
    "block": "exit_block",
}


def to_ns(seconds: float) -> int:
    """Nearest integer nanoseconds."""
    return round(seconds * 1e9)
