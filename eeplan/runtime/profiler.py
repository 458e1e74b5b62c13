"""Measures an op profile on this machine: ``measure`` starts the ranks, the module's entry is one rank.

All ranks measure at the same time, as many as the run will have on this machine (up to its cores), so that
contention for caches and memory bandwidth is part of the numbers.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from eeplan.errors import EeplanError
from eeplan.profile import OpCost, OpProfile, Transfer, load_profile
from eeplan.runtime.launch import available_cores, default_threads, die_with_parent, launch
from eeplan.schema import Model, load_yaml, write_yaml
from eeplan.spec import RunSpec, replace_keys

MAX_LAYERS = 4
"""Layers of the miniature stage; enough that no layer's weights stay in cache until its next turn."""
STEPS = ("start processes", "messages and reductions", "ops", "optimizer", "decode steps")
_RUN, _LINKS, _PROFILE = "run.yaml", "links.yaml", "profile.yaml"
_STEP_LINE = re.compile(r"measuring (\d+): (.+)")


def measure(
    run: RunSpec,
    *,
    micro_batch_sizes: Sequence[int] = (),
    seconds: float = 8.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> OpProfile:
    """Measure every op that a plan of ``run`` may need, on this machine.

    Args:
        micro_batch_sizes: to measure ops at; empty takes the run's alone.
        seconds: time spent on timing ops of each size, after warm-up.
        progress: called with (steps done, steps in all, name of the next step).

    Raises:
        LaunchError: a rank died.
    """
    shares = run.parallel.tensor_model_parallel_size
    sizes = sorted(set(micro_batch_sizes)) or [run.training.micro_batch_size]
    processes = max(1, min(run.parallel.world_size, available_cores()) // shares) * shares

    def on_line(line: str) -> None:
        step = _STEP_LINE.fullmatch(line.strip())
        if step is None:
            print(line, file=sys.stderr, flush=True)
        elif progress is not None:
            progress(int(step[1]), len(STEPS), step[2])

    with tempfile.TemporaryDirectory(prefix="eeplan-profile-") as name:
        folder = Path(name)
        write_yaml(folder / _RUN, run)

        def start(part: str, nproc: int) -> None:
            launch(
                "eeplan.runtime.profiler",
                [part, str(folder), "--seconds", str(seconds), "--micro-batch-sizes", *map(str, sizes)],
                nproc=nproc,
                threads_per_process=default_threads(processes),
                on_line=on_line,
            )

        # Messages need two processes even when the run has one; ops must then be measured by one alone.
        start("links", max(2, processes))
        start("ops", processes)
        return load_profile(folder / _PROFILE)[0]


class Links(Model):
    """What only several processes can measure; handed from the first job to the second."""

    p2p: Transfer
    all_reduce: Transfer
    microbatch_overhead_s: float


def main(argv: list[str] | None = None) -> int:
    """One rank of a measurement."""
    parser = argparse.ArgumentParser(prog="eeplan.runtime.profiler")
    parser.add_argument("part", choices=("links", "ops"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", required=True)
    arguments = parser.parse_args(argv)
    try:
        run, _ = load_yaml(arguments.folder / _RUN, RunSpec, "run file")
        if arguments.part == "links":
            _measure_links(run, arguments.folder)
        else:
            _measure_ops(run, arguments.folder, arguments.seconds, arguments.micro_batch_sizes)
    except EeplanError as error:
        print(f"eeplan: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _announce(rank: int, step: int) -> None:
    if rank == 0:
        print(f"measuring {step}: {STEPS[step]}", file=sys.stderr, flush=True)


def _measure_links(run: RunSpec, folder: Path) -> None:
    """Messages, reductions, and what a stage spends around its ops; rank 0 writes."""
    from eeplan.runtime import backend as backends
    from eeplan.runtime.link_timing import measure_all_reduce, measure_p2p
    from eeplan.runtime.op_timing import random_batch
    from eeplan.runtime.overhead_timing import batch_source, measure_overhead

    backend = backends.start()
    _announce(backend.rank, 1)
    synthetic = random_batch(run, backend.device)
    links = Links(
        p2p=measure_p2p(run, backend),
        all_reduce=measure_all_reduce(run, backend),
        microbatch_overhead_s=measure_overhead(
            run, backend, batch_source(run, backend) or (lambda: synthetic)
        ),
    )
    if backend.rank == 0:
        write_yaml(folder / _LINKS, links)
    backends.stop()


def _measure_ops(run: RunSpec, folder: Path, seconds: float, sizes: Sequence[int]) -> None:
    """Ops, optimizer and decode steps on all ranks at once; rank 0 writes the profile."""
    # What ranks divide between them is derived from what one of them has to do alone.
    run = replace_keys(
        run, {"parallel.use_distributed_optimizer": False, "parallel.overlap_grad_reduce": False}
    )
    import torch
    import torch.distributed as dist

    from eeplan.profile import DeviceFingerprint, ModelShape
    from eeplan.runtime import backend as backends
    from eeplan.runtime.clock import Clock
    from eeplan.runtime.decode_timing import measure_decode_costs
    from eeplan.runtime.memory import resident_bytes
    from eeplan.runtime.model import build_model
    from eeplan.runtime.op_timing import measure_ops, miniature_stage, random_batch
    from eeplan.runtime.optimizer import Training
    from eeplan.runtime.optimizer_timing import measure_optimizer
    from eeplan.runtime.recording import device_fingerprint

    backend = backends.start(
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        embedding_ranks=lambda ranks: list(ranks)[:1],
    )
    base_bytes = resident_bytes()
    clock = Clock(backend.device)
    layers = min(MAX_LAYERS, max(1, run.model.num_layers // run.parallel.pipeline_model_parallel_size))
    training = Training(run, build_model(run, miniature_stage(layers), backend), backend)
    dist.barrier()
    _announce(backend.rank, 2)
    ops: list[OpCost] = []
    disturbed: list[float] = []
    for size in sizes:
        batch = random_batch(run, backend.device, size)
        costs, share = measure_ops(
            training.model, batch, clock, backend.device, seconds=seconds, min_rounds=5
        )
        ops += costs
        disturbed.append(share)
        dist.barrier()
    _announce(backend.rank, 3)
    half = replace(miniature_stage(max(1, layers // 2)), exits=())
    small = Training(run, build_model(run, half, backend), backend)
    optimizer = measure_optimizer([small, training], clock)
    del training, small
    _announce(backend.rank, 4)
    decode = measure_decode_costs(run, backend, dist.new_group(), backend.world_size, seconds=seconds / 4)
    if backend.rank == 0:
        links, _ = load_yaml(folder / _LINKS, Links, "measured links")
        profile = OpProfile(
            schema_version=1,
            device=DeviceFingerprint(**device_fingerprint(backend.device)),
            software=backends.software(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            threads=torch.get_num_threads(),
            processes=backend.world_size,
            shape=ModelShape.of(run),
            ops=tuple(ops),
            p2p=links.p2p,
            all_reduce=links.all_reduce,
            optimizer=optimizer,
            microbatch_overhead_s=links.microbatch_overhead_s,
            disturbed_share=fmean(disturbed),
            process_base_bytes=base_bytes,
            decode=decode,
        )
        write_yaml(folder / _PROFILE, profile)
    dist.barrier()
    backends.stop()


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
