"""A process that runs one stage of a decoding pipeline after the first; see ``pipeline``.

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
from typing import Any

from eeplan.runtime.launch import die_with_parent


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
    following: int | None

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def main(job: StageJob) -> None:
    """Load the stage, then pass rows on until the connection ends."""
    from eeplan.errors import EeplanError
    from eeplan.runtime.decode.channel import Channel, Closed, Failed, Ready

    driver, previous, following = (
        None if number is None else Channel(socket.socket(fileno=number), job.timeout_s)
        for number in (job.driver, job.previous, job.following)
    )
    assert driver is not None, "a worker reports to the driver"
    assert previous is not None, "a worker is not the first stage"
    try:
        run = _load(job)
        driver.send(Ready())
        _serve(run, driver, previous, following)
    except Closed:
        # Somebody is gone: the driver ends all others.
        return
    except EeplanError as error:
        driver.send(Failed(str(error)))


def _load(job: StageJob) -> Callable[..., list[Any]]:
    import torch

    from eeplan.runtime.decode.network import Transformer
    from eeplan.runtime.decode.stage_rows import StageRunner
    from eeplan.runtime.decode.stages import decode_stages, open_checkpoint, stage_weights

    torch.set_num_threads(job.threads)
    checkpoint = open_checkpoint(Path(job.checkpoint))
    stage = decode_stages(checkpoint.plan, job.num_stages)[job.stage]
    dtype = None if job.dtype is None else getattr(torch, job.dtype)
    return StageRunner(Transformer(stage_weights(checkpoint, stage, job.vocab_size, dtype))).run


def _serve(run: Callable[..., list[Any]], driver: Any, previous: Any, following: Any) -> None:
    from eeplan.runtime.decode.channel import readable

    def emit(sequence: int, emission: Any) -> None:
        driver.send((sequence, emission))

    while True:
        messages = previous.receive()
        # Whatever has come in meanwhile goes through the layers together.
        while readable((previous,)):
            messages += previous.receive()
        onward = run(messages, emit)
        if following is not None and onward:
            following.send(onward)


if __name__ == "__main__":
    die_with_parent()
    main(StageJob(**json.loads(sys.argv[1])))
