"""A process of a decoding pipeline other than the one that drives it; see ``pipeline``.

Started as ``python -m eeplan.runtime.decode.stage_worker`` with a :class:`StageJob` as JSON. It ends when the
process before it does.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eeplan.runtime.launch import die_with_parent

if TYPE_CHECKING:
    from eeplan.runtime.decode.channel import Channel


@dataclass(frozen=True, slots=True)
class StageJob:
    """What a worker is to do, in plain data. Sockets are file descriptors that it inherits."""

    checkpoint: str
    stage: int
    num_stages: int
    vocab_size: int | None
    dtype: str | None
    """Name of a torch dtype."""
    threads: int
    timeout_s: float
    driver: int
    """To the process that runs the first stage: tokens, and errors."""
    previous: int
    """Where its work comes from: the stage before, or the first process of its own stage."""
    following: int | None
    tensor_rank: int = 0
    tensor_size: int = 1
    peers: tuple[int, ...] = ()
    """Of the first process of a stage, to its others."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StageJob:
        """Inverse of :meth:`to_json`."""
        found = json.loads(text)
        return cls(**{**found, "peers": tuple(found["peers"])})


def main(job: StageJob) -> None:
    """Load the stage, then pass rows on until the connection ends."""
    from eeplan.errors import EeplanError
    from eeplan.runtime.decode.channel import Closed, Failed, Ready

    driver, previous = _channel(job.driver, job), _channel(job.previous, job)
    following = None if job.following is None else _channel(job.following, job)
    team = [_channel(number, job) for number in job.peers] if job.tensor_rank == 0 else [previous]
    try:
        run = _load(job, team)
        driver.send(Ready())
        _serve(job, run, driver, previous, following)
    except Closed:
        # Somebody is gone: the driver ends all others.
        return
    except EeplanError as error:
        driver.send(Failed(str(error)))


def _channel(number: int, job: StageJob) -> Channel:
    from eeplan.runtime.decode.channel import Channel

    return Channel(socket.socket(fileno=number), job.timeout_s)


def _load(job: StageJob, channels: list[Channel]) -> Callable[..., list[Any]]:
    import torch

    from eeplan.runtime.decode.network import Transformer
    from eeplan.runtime.decode.stage_rows import StageRunner
    from eeplan.runtime.decode.stages import decode_stages, open_checkpoint, stage_weights
    from eeplan.runtime.decode.team import Team

    torch.set_num_threads(job.threads)
    checkpoint = open_checkpoint(Path(job.checkpoint))
    stage = decode_stages(checkpoint.plan, job.num_stages)[job.stage]
    team = Team(job.tensor_rank, job.tensor_size, channels) if job.tensor_size > 1 else Team()
    return StageRunner(Transformer(stage_weights(checkpoint, stage, job.vocab_size, job.dtype, team))).run


def _serve(
    job: StageJob,
    run: Callable[..., list[Any]],
    driver: Channel,
    previous: Channel,
    following: Channel | None,
) -> None:
    from eeplan.runtime.decode.channel import readable

    def emit(sequence: int, emission: Any) -> None:
        if job.tensor_rank == 0:
            driver.send((sequence, emission))

    while True:
        messages = previous.receive()
        # Whatever has come in meanwhile goes through the layers together; a team goes by its first process.
        while job.tensor_rank == 0 and readable((previous,)):
            messages += previous.receive()
        onward = run(messages, emit)
        if following is not None and onward:
            following.send(onward)


if __name__ == "__main__":
    die_with_parent()
    main(StageJob.from_json(sys.argv[1]))
