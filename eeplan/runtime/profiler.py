"""Measures an op profile on this machine: ``measure`` starts the ranks, the module's entry is one rank.

All ranks measure at the same time, as many as the run will have on this machine (up to its cores), so that
contention for caches and memory bandwidth is part of the numbers.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from eeplan.errors import EeplanError
from eeplan.profile import OpProfile, load_profile
from eeplan.runtime.launch import available_cores, default_threads, die_with_parent, launch
from eeplan.schema import load_yaml, write_yaml
from eeplan.spec import RunSpec

MAX_LAYERS = 4
"""Layers of the miniature stage; enough that no layer's weights stay in cache until its next turn."""
STEPS = ("start processes", "messages and reductions", "ops", "optimizer", "decode steps")
_STEP_LINE = re.compile(r"measuring (\d+): (.+)")


def measure(
    run: RunSpec, *, seconds: float = 8.0, progress: Callable[[int, int, str], None] | None = None
) -> OpProfile:
    """Measure every op that a plan of ``run`` may need, on this machine.

    Args:
        seconds: time spent on timing ops, after warm-up.
        progress: called with (steps done, steps in all, name of the next step).

    Raises:
        LaunchError: a rank died.
    """
    processes = max(1, min(run.parallel.world_size, available_cores()))

    def on_line(line: str) -> None:
        step = _STEP_LINE.fullmatch(line.strip())
        if step is None:
            print(line, file=sys.stderr, flush=True)
        elif progress is not None:
            progress(int(step[1]), len(STEPS), step[2])

    with tempfile.TemporaryDirectory(prefix="eeplan-profile-") as name:
        run_file, out = Path(name) / "run.yaml", Path(name) / "profile.yaml"
        write_yaml(run_file, run)
        launch(
            "eeplan.runtime.profiler",
            [str(run_file), str(out), "--seconds", str(seconds), "--processes", str(processes)],
            # Messages need two processes even when the run has one.
            nproc=max(2, processes),
            threads_per_process=default_threads(processes),
            on_line=on_line,
        )
        return load_profile(out)[0]


def main(argv: list[str] | None = None) -> int:
    """One rank of a measurement."""
    parser = argparse.ArgumentParser(prog="eeplan.runtime.profiler")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--processes", type=int, required=True)
    arguments = parser.parse_args(argv)
    try:
        run, _ = load_yaml(arguments.run, RunSpec, "run file")
        profile = _measure_on_this_rank(run, arguments.seconds, arguments.processes)
        if profile is not None:
            write_yaml(arguments.out, profile)
    except EeplanError as error:
        print(f"eeplan: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _measure_on_this_rank(run: RunSpec, seconds: float, processes: int) -> OpProfile | None:
    """Measure together with the other ranks; rank 0 returns the profile."""
    import torch
    import torch.distributed as dist

    from eeplan.profile import DeviceFingerprint, ModelShape
    from eeplan.runtime import backend as backends
    from eeplan.runtime.clock import Clock
    from eeplan.runtime.decode_timing import measure_decode_costs
    from eeplan.runtime.link_timing import measure_all_reduce, measure_p2p
    from eeplan.runtime.memory import resident_bytes
    from eeplan.runtime.model import build_model
    from eeplan.runtime.op_timing import measure_ops, miniature_stage, random_batch
    from eeplan.runtime.optimizer import Training
    from eeplan.runtime.optimizer_timing import measure_optimizer
    from eeplan.runtime.overhead_timing import batch_source, measure_overhead
    from eeplan.runtime.recording import device_fingerprint

    def announce(step: int) -> None:
        if backend.rank == 0:
            print(f"measuring {step}: {STEPS[step]}", file=sys.stderr, flush=True)

    backend = backends.start(
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        embedding_ranks=lambda ranks: list(ranks)[:1],
    )
    base_bytes = resident_bytes()
    announce(1)
    p2p = measure_p2p(run, backend)
    all_reduce = measure_all_reduce(run, backend)
    synthetic = random_batch(run, backend.device)
    overhead_s = measure_overhead(run, backend, batch_source(run, backend) or (lambda: synthetic))
    busy = backend.rank < processes
    group = dist.new_group(list(range(processes)))
    profile = None
    if busy:
        layers = min(MAX_LAYERS, max(1, run.model.num_layers // run.parallel.pipeline_model_parallel_size))
        model = build_model(run, miniature_stage(layers), backend)
        training = Training(run, model, backend)
        dist.barrier(group=group)
        announce(2)
        ops = measure_ops(
            model, synthetic, Clock(backend.device), backend.device,
            seconds=seconds, min_rounds=5,
        )  # fmt: skip
        dist.barrier(group=group)
        announce(3)
        half = replace(miniature_stage(max(1, layers // 2)), exits=())
        small = Training(run, build_model(run, half, backend), backend)
        optimizer = measure_optimizer([small, training], Clock(backend.device))
        del model, training, small
        announce(4)
        decode = measure_decode_costs(run, backend, group, processes, seconds=seconds / 4)
        if backend.rank == 0:
            profile = OpProfile(
                schema_version=1,
                device=DeviceFingerprint(**device_fingerprint(backend.device)),
                software=backends.software(),
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                threads=torch.get_num_threads(),
                processes=processes,
                shape=ModelShape.of(run),
                ops=tuple(ops),
                p2p=p2p,
                all_reduce=all_reduce,
                optimizer=optimizer,
                microbatch_overhead_s=overhead_s,
                process_base_bytes=base_bytes,
                decode=decode,
            )
    dist.barrier()
    backends.stop()
    return profile


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
