"""One rank of ``eeplan bench train``: the same iterations by our executor and by megatron-core's schedule.

Every round runs each contender once; six rounds go through all orders, so that whatever else the machine
does, and what a contender leaves in caches and in the allocator, meets all of them alike. An iteration here
is forward, backward and gradient synchronisation; reading data and the optimizer step are the same code in
both and left out.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from eeplan.plan import load_plan
from eeplan.runtime.backend import stop
from eeplan.runtime.benches.stock import run_stock_schedule
from eeplan.runtime.launch import die_with_parent
from eeplan.runtime.op_timing import random_batch
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.stage import Batch

WARM_UP_ROUNDS = 2


def main(folder: Path, rounds: int) -> None:
    """Time all contenders; rank 0 writes ``times.json`` into ``folder``.

    ``folder`` holds ``plain.yaml``, a plan without exits, and ``exits.yaml``, the same with exits.
    """
    plain, exits = (set_up(load_plan(folder / f"{name}.yaml")) for name in ("plain", "exits"))
    batches = _batches(plain)
    contenders: dict[str, Callable[[], object]] = {
        "own": lambda: _own(plain, batches),
        "stock": lambda: _stock(plain, batches),
        "exits": lambda: _own(exits, batches),
    }
    for run in contenders.values():
        run()
    difference = _largest_difference(plain, contenders)
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    orders = list(itertools.permutations(contenders))
    for index in range(WARM_UP_ROUNDS + rounds):
        for name in orders[index % len(orders)]:
            times[name].append(_timed(contenders[name]))
        gc.collect()
    if dist.get_rank() == 0:
        found = {name: seconds[WARM_UP_ROUNDS:] for name, seconds in times.items()}
        (folder / "times.json").write_text(json.dumps({"seconds": found, "difference": difference}))
    dist.barrier()
    stop()


def _batches(rank: Rank) -> list[Batch]:
    """Random text, another for each microbatch, equal on all stages."""
    first = random_batch(rank.plan.run, rank.backend.device)
    size = rank.plan.run.model.vocab_size
    return [
        replace(first, tokens=(first.tokens + m) % size, labels=(first.labels + m) % size)
        for m in range(rank.plan.num_microbatches)
    ]


def _own(rank: Rank, batches: Sequence[Batch]) -> None:
    rank.training.zero_gradients()
    rank.executor.run(lambda microbatch: batches[microbatch])
    rank.training.synchronize_gradients()


def _stock(rank: Rank, batches: Sequence[Batch]) -> None:
    rank.training.zero_gradients()
    run_stock_schedule(rank, batches)
    rank.training.synchronize_gradients()


def _timed(run: Callable[[], object]) -> float:
    """Seconds from the first rank's start to the last rank's end."""
    dist.barrier()
    start_ns = time.monotonic_ns()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ends = torch.tensor([start_ns, -time.monotonic_ns()])
    if torch.cuda.is_available():
        ends = ends.cuda()
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    first_start_ns, minus_last_end_ns = ends.tolist()
    return float(-minus_last_end_ns - first_start_ns) / 1e9


def _largest_difference(rank: Rank, contenders: dict[str, Callable[[], object]]) -> float:
    """Of the two ways' gradients, relative to the largest gradient; over all ranks."""
    contenders["own"]()
    own = _gradients(rank)
    contenders["stock"]()
    stock = _gradients(rank)
    numbers = torch.stack([(own - stock).abs().max(), stock.abs().max()])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return float(numbers[0] / numbers[1])


def _gradients(rank: Rank) -> Tensor:
    return torch.cat([buffer.grad_data.flatten().float() for buffer in rank.training.ddp.buffers])


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]), int(sys.argv[2]))
