"""The engine's answer without spans, for many cost candidates at once.

Promises the engine's end times to the nanosecond (tested) on what each function covers:

    closed_form_makespans_ns    1F1B, free messages, M >= P; no loop over microbatches at all
    makespans_ns, ends_ns       1F1B, any M, messages of any length, both transports; compiled

Times must stay below 2^63 ns in sum; that is 292 years.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eeplan.sim.costs import Transport as Transport

Nanoseconds = NDArray[np.int64]


def closed_form_makespans_ns(
    forward_ns: Nanoseconds, backward_ns: Nanoseconds, num_microbatches: int
) -> Nanoseconds:
    """``bounds.closed_form_ns`` of many candidates: the makespan of 1F1B without message times.

    Args:
        forward_ns: [candidates, P], one microbatch's forward.
        backward_ns: [candidates, P].
        num_microbatches: M, for all of them.

    Returns:
        [candidates].

    Raises:
        ValueError: shapes that do not fit, or M < P, where the closed form does not hold.
    """
    from eeplan.sim import kernels

    forward_ns, backward_ns = _stage_times(forward_ns, backward_ns)
    num_candidates, num_stages = forward_ns.shape
    if num_microbatches < num_stages:
        raise ValueError(
            f"the closed form needs at least as many microbatches as stages, got {num_microbatches} "
            f"for {num_stages}; use makespans_ns"
        )
    makespans = np.empty(num_candidates, np.int64)
    kernels.closed_form(forward_ns, backward_ns, num_microbatches, makespans)
    return makespans


def makespans_ns(
    forward_ns: Nanoseconds,
    backward_ns: Nanoseconds,
    num_microbatches: int,
    message_ns: Nanoseconds | Sequence[int],
    transport: Transport = "asynchronous",
) -> Nanoseconds:
    """Makespan of 1F1B for many candidates; arguments and errors as for :func:`ends_ns`.

    Returns:
        [candidates].
    """
    ends: Nanoseconds = ends_ns(forward_ns, backward_ns, num_microbatches, message_ns, transport).max(axis=1)
    return ends


def ends_ns(
    forward_ns: Nanoseconds,
    backward_ns: Nanoseconds,
    num_microbatches: int,
    message_ns: Nanoseconds | Sequence[int],
    transport: Transport = "asynchronous",
) -> Nanoseconds:
    """When each stage is done with 1F1B, its last message included if that is a rendezvous.

    Args:
        forward_ns: [candidates, P], one microbatch's forward.
        backward_ns: [candidates, P].
        num_microbatches: M, for all of them.
        message_ns: time of one message over each link, either way: [P-1] for all, or [candidates, P-1].
        transport: as for the engine. ``rendezvous`` is Megatron's blocking p2p in its default order, in which
            both ends of a link pass the forward message and then the backward one.

    Returns:
        [candidates, P].

    Raises:
        ValueError: shapes that do not fit, or no microbatches.
    """
    from eeplan.sim import kernels

    forward_ns, backward_ns = _stage_times(forward_ns, backward_ns)
    num_candidates, num_stages = forward_ns.shape
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches; give at least 1")
    messages = np.asarray(message_ns, dtype=np.int64)
    if messages.shape not in ((num_stages - 1,), (num_candidates, num_stages - 1)):
        raise ValueError(
            f"message times of shape {messages.shape} for {num_candidates} candidates of {num_stages} "
            f"stages; expected one per link, ({num_stages - 1},), or ({num_candidates}, {num_stages - 1})"
        )
    # A copy, because kernels are compiled anew for arrays that are read-only.
    messages = np.array(np.broadcast_to(messages, (num_candidates, num_stages - 1)), order="C")
    run = {"asynchronous": kernels.asynchronous, "rendezvous": kernels.rendezvous}[transport]
    ends = np.empty((num_candidates, num_stages), np.int64)
    run(forward_ns, backward_ns, messages, num_microbatches, ends)
    return ends


def _stage_times(forward_ns: Nanoseconds, backward_ns: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    forward_ns, backward_ns = (np.ascontiguousarray(t, dtype=np.int64) for t in (forward_ns, backward_ns))
    if forward_ns.ndim != 2 or forward_ns.shape[1] < 1 or forward_ns.shape != backward_ns.shape:
        raise ValueError(
            f"forward times of shape {forward_ns.shape} and backward times of shape {backward_ns.shape}; "
            "expected [candidates, stages] twice"
        )
    return forward_ns, backward_ns
