"""Ranks for tests, forked from a process that has imported torch and megatron-core already.

A rank of the launcher spends seconds of CPU on these imports, most tests' ranks much less on their work. The
ranks here meet as under torchrun: same variables, a store that is not theirs. What the launcher itself
promises is tested with real launches, in test_launch, test_torchrun, test_train and test_resume_signals.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch.distributed import TCPStore, distributed_c10d
from torch.multiprocessing import start_processes

from eeplan.runtime.launch import die_with_parent

PRELOADED = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.optim",
    "megatron.core.pipeline_parallel",
    "eeplan.runtime.loop",
    "eeplan.sim.planner",
)
"""What workers import. A module that is missing here only costs its import in every rank."""


def run_ranks(module: str, arguments: Sequence[str | Path], nproc: int) -> None:
    """Call ``main(*arguments)`` of a module on ``nproc`` ranks of one thread each, and wait for them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that failed first; the
            others are ended, as when the test itself is.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = start_processes(
        _run_rank,
        (module, tuple(arguments), nproc, store.port),
        nprocs=nproc,
        join=False,
        start_method="forkserver",
    )
    try:
        while not ranks.join():
            continue
    finally:
        for process in ranks.processes:
            process.kill()


def forget_layout() -> None:
    """Drop all groups but that of all ranks, so that the next model may be laid out in another way.

    megatron-core would only forget them, and every gloo group keeps a thread that wakes a hundred times a
    second.
    """
    parallel_state.destroy_model_parallel()
    for group in [*distributed_c10d._world.pg_map]:
        if group is not distributed_c10d.group.WORLD:
            distributed_c10d.destroy_process_group(group)


def _run_rank(rank: int, module: str, arguments: tuple[str | Path, ...], nproc: int, port: int) -> None:
    """In the new process: be the rank that torchrun would have started."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    die_with_parent()
    torch.set_num_threads(1)
    importlib.import_module(module).main(*arguments)
