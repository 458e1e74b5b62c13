"""One stage of a rehearsal: the executor of training, with a computation that only sleeps.

Started by ``rehearse``. Loads torch for its processes and messages, and nothing of megatron-core, so that
eight of these start in seconds on two cores.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eeplan.runtime.launch import die_with_parent
from eeplan.sim.schedule import Instruction, Op, Schedule

_PR_SET_TIMERSLACK = 29


def main(folder: Path) -> None:
    """Read the script in ``folder``, take part, leave ``stage<rank>.json`` there."""
    import torch
    import torch.distributed as dist

    from eeplan.runtime.clock import Clock
    from eeplan.runtime.executor import Channels, Executor
    from eeplan.runtime.precision import dtype_of

    script = json.loads((folder / "script.json").read_text())
    wake_on_time()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    channels = Channels(
        forward_group=dist.new_group(),
        backward_group=dist.new_group(),
        previous_rank=stage - 1 if stage > 0 else None,
        next_rank=stage + 1 if stage < last else None,
        message_shape=tuple(script["message_shape"]),
        dtype=dtype_of(script["precision"]),
        device=torch.device("cpu"),
    )
    schedule = Schedule(
        script["num_microbatches"],
        tuple(tuple(Instruction(Op(op), m) for op, m in program) for program in script["stages"]),
    )
    message = torch.zeros(channels.message_shape, dtype=channels.dtype)
    computation = Sleeping(schedule.stages[stage], script["sleeps_ns"][stage], message)
    executor = Executor(schedule, stage, computation, channels, Clock(channels.device))
    seen = []
    for _ in range(script["iterations"]):
        dist.barrier()
        record = executor.run(lambda microbatch: None)  # type: ignore[arg-type, return-value]
        sleep_until(time.monotonic_ns() + script["tail_ns"])
        spans = [[span.kind, span.microbatch, span.start, span.end] for span in record.spans]
        seen.append({"spans": spans, "end": time.monotonic_ns()})
    (folder / f"stage{stage}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


class Sleeping:
    """A computation (``executor.Computation``) that takes the planned time and sends a tensor of zeros.

    Args:
        program: this stage's instructions; they say which ops have something to send.
        sleeps_ns: (kind, microbatch, nanoseconds) of every op.
        message: what is sent.
    """

    def __init__(self, program: Sequence[Instruction], sleeps_ns: Sequence[Any], message: Any) -> None:
        self._sends = {(i.op, i.microbatch) for i in program}
        self._sleeps_ns = {(kind, microbatch): ns for kind, microbatch, ns in sleeps_ns}
        self._message = message

    def forward(self, microbatch: int, received: Any, batch: Any) -> Any:
        """Sleep; hidden states for the next stage where the schedule sends them."""
        return self._take("forward", Op.SEND_FORWARD, microbatch)

    def backward(self, microbatch: int, gradient: Any) -> tuple[Any, dict[str, Any]]:
        """Sleep; a gradient for the previous stage where the schedule sends it."""
        return self._take("backward", Op.SEND_BACKWARD, microbatch), {}

    def _take(self, kind: str, send: Op, microbatch: int) -> Any:
        sleep_until(time.monotonic_ns() + self._sleeps_ns[kind, microbatch])
        return self._message if (send, microbatch) in self._sends else None


def sleep_until(at_ns: int) -> None:
    """Sleep to a moment of the machine's clock; at once if it has passed."""
    remaining_ns = at_ns - time.monotonic_ns()
    if remaining_ns > 0:
        time.sleep(remaining_ns / 1e9)


def wake_on_time() -> None:
    """Have Linux end this thread's sleeps when asked, not up to 50 microseconds later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]))
