"""From op costs to stage costs: what one microbatch takes on each stage, in time and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """All that the simulator needs to know about P stages. Tuples have one entry per stage."""

    forward_ns: tuple[int, ...]
    """One microbatch's forward; includes eager exit forwards."""
    backward_ns: tuple[int, ...]
    """One microbatch's backward; includes deferred exit forwards."""
    latency_ns: int = 0
    """Fixed part of one message."""
    bytes_per_s: float = float("inf")
    """Bandwidth of a link between neighbours."""
    output_bytes: tuple[int, ...] = ()
    """Message size from stage i to i+1 (and of its gradient back); last entry 0."""
    static_bytes: tuple[int, ...] = ()
    """Parameters, gradients, optimizer state."""
    kept_bytes: tuple[int, ...] = ()
    """Per microbatch, from the end of its forward to the end of its backward."""
    forward_transient_bytes: tuple[int, ...] = ()
    """Beyond ``kept_bytes``, while a forward runs."""
    backward_transient_bytes: tuple[int, ...] = ()
    """Beyond ``kept_bytes``, while a backward runs."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.forward_ns)
