"""Naive planner: every placement of the exits, composed op by op, run by the engine, with memory walked.

Written without eeplan's cost composition and search. Shares with them only the profile, the engine, and the
order in which a stage runs its ops: layers, eager exits by depth, final head; deferred exits at the start of
the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod

from eeplan.profile import OpCost, OpProfile
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b
from eeplan.spec import Boundary, ExitForward, RunSpec


@dataclass(frozen=True)
class NaiveExit:
    """One (layer, boundary) pair, on the stage that runs the layer."""

    layer: int
    boundary: Boundary
    stage: int

    @property
    def depth(self) -> int:
        return self.layer if self.boundary == "after" else self.layer - 1


@dataclass(frozen=True)
class NaiveVerdict:
    """What a placement costs."""

    split: tuple[int, ...]
    exits: tuple[NaiveExit, ...]
    mode: ExitForward
    iteration_ns: int
    peak_bytes: tuple[int, ...]
    overshoot: int

    @property
    def objective(self) -> tuple[int, bool, int, int]:
        """Less is better; the order that the planner promises."""
        return self.iteration_ns, self.mode == "eager", max(self.peak_bytes), self.overshoot


def splits_of(run: RunSpec) -> Iterator[tuple[int, ...]]:
    """Every number of layers per stage that the run allows."""
    layers, stages = run.model.num_layers, run.parallel.pipeline_model_parallel_size
    split = run.parallel.layer_split
    if split == "uniform":
        yield (layers // stages,) * stages
    elif split == "auto":
        for cuts in combinations(range(1, layers), stages - 1):
            yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))
    else:
        yield split


def all_verdicts(
    run: RunSpec, profile: OpProfile, num_exits: int, modes: Sequence[ExitForward]
) -> Iterator[NaiveVerdict]:
    """Judge every set of ``num_exits`` exits that read different hidden states, under every split."""
    layers = run.model.num_layers
    for split in splits_of(run):
        stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
        spots = [
            NaiveExit(layer, boundary, stage_of[layer - 1])
            for layer in range(1, layers + 1)
            for boundary in ("before", "after")
        ]
        spots = [spot for spot in spots if 0 < spot.depth < layers]
        for exits in combinations(spots, num_exits):
            if len({spot.depth for spot in exits}) == num_exits:
                for mode in modes:
                    yield verdict(run, profile, split, exits, mode)


def verdict(
    run: RunSpec, profile: OpProfile, split: Sequence[int], exits: Sequence[NaiveExit], mode: ExitForward
) -> NaiveVerdict:
    """Judge one placement."""
    stages = run.parallel.pipeline_model_parallel_size
    naive = [NaiveStage(run, profile, split, stage, exits, mode) for stage in range(stages)]
    costs = PipelineCosts(
        forward_ns=tuple(stage.forward_ns() for stage in naive),
        backward_ns=tuple(stage.backward_ns() for stage in naive),
        message_ns=(_message_ns(profile, naive[0].hidden_bytes),) * (stages - 1),
        output_bytes=(naive[0].hidden_bytes,) * (stages - 1) + (0,),
    )
    timeline = simulate(one_f_one_b(stages, run.num_microbatches), costs)
    ends = [spans[-1].end_ns for spans in timeline.spans]
    ready = [end + stage.data_sync_ns() for end, stage in zip(ends, naive, strict=True)]
    copies = [time for time, stage in zip(ready, naive, strict=True) if stage.holds_shared_matrix()]
    matrix = 4 * naive[0].matrix_parameters()
    synced = max(*ready, max(copies) + _all_reduce_ns(profile, matrix, len(copies)))
    step_s = max(
        profile.optimizer.fixed_s + stage.parameters() * profile.optimizer.per_parameter_s for stage in naive
    )
    layers = run.model.num_layers
    # Needed depths are uniform in (0, layers]; within layer i, the next exit is half a layer less than
    # (exit - i) further on average. Doubled, so that it is an integer.
    marks = sorted({layers, *(spot.depth for spot in exits)})
    overshoot = sum(2 * (min(mark for mark in marks if mark > i) - i) - 1 for i in range(layers))
    return NaiveVerdict(
        split=tuple(split),
        exits=tuple(exits),
        mode=mode,
        iteration_ns=synced + round(step_s * 1e9) + round(profile.iteration_overhead_s * 1e9),
        peak_bytes=tuple(stage.peak_bytes() + profile.process_base_bytes for stage in naive),
        overshoot=overshoot,
    )


class NaiveStage:
    """One stage's ops as lists, its parameters as tensor shapes, its memory as a set of live blocks."""

    def __init__(
        self,
        run: RunSpec,
        profile: OpProfile,
        split: Sequence[int],
        stage: int,
        exits: Sequence[NaiveExit],
        mode: ExitForward,
        exact_gradients: bool = False,
    ) -> None:
        self.run, self.profile, self.stage = run, profile, stage
        self.exits = sorted((spot for spot in exits if spot.stage == stage), key=lambda spot: spot.depth)
        self.eager = mode == "eager"
        self.exact_gradients = exact_gradients
        """Free an exit's gradient when the backward reaches its layer, instead of after all layers."""
        self.num_stages = run.parallel.pipeline_model_parallel_size
        self.is_first, self.is_last = stage == 0, stage == self.num_stages - 1
        self.num_layers, self.first_depth = split[stage], sum(split[:stage])
        width = 4 if run.training.precision == "fp32" else 2
        tokens = run.training.micro_batch_size * run.training.seq_length
        self.hidden_bytes = tokens * run.model.hidden_size * width

    def op(self, name: str) -> OpCost:
        return next(cost for cost in self.profile.ops if cost.op == name)

    def exit_op(self) -> OpCost:
        return self.op(f"exit_{self.run.exits.head}")

    def forward_ns(self) -> int:
        ops = [self.op("layer")] * self.num_layers
        ops += [self.op("embedding")] * self.is_first + [self.op("final_head")] * self.is_last
        ops += [self.exit_op()] * len(self.exits) * self.eager
        return round(self.profile.microbatch_overhead_s * 1e9) + sum(_ns(op.forward.mean_s) for op in ops)

    def backward_ns(self) -> int:
        ops = [self.op("layer")] * self.num_layers + [self.exit_op()] * len(self.exits)
        ops += [self.op("embedding")] * self.is_first + [self.op("final_head")] * self.is_last
        total = sum(_ns(op.backward.mean_s) for op in ops)
        if not self.eager:
            total += len(self.exits) * _ns(self.exit_op().forward.mean_s)
        return total

    def matrix_parameters(self) -> int:
        tp = self.run.parallel.tensor_model_parallel_size
        return self.run.model.hidden_size * (self.run.padded_vocab_size // tp)

    def _exits_are_tied(self) -> bool:
        return not self.run.exits.untie_exit_output_weights

    def holds_shared_matrix(self) -> bool:
        tied_model = not self.run.model.untie_embeddings_and_output_weights
        return bool(self.is_last or (self.is_first and tied_model) or (self.exits and self._exits_are_tied()))

    def parameters(self) -> int:
        """Sum over the shapes of all tensors that one rank holds."""
        model, tp = self.run.model, self.run.parallel.tensor_model_parallel_size
        h, ffn, norm = model.hidden_size, model.ffn_size // tp, (model.hidden_size,)
        kv = model.query_groups * (h // model.num_attention_heads) // tp
        mlp = [(2 * ffn, h), (h, ffn), norm]
        layer = [(h // tp, h), (kv, h), (kv, h), (h, h // tp), norm, *mlp]
        vocabulary = (self.run.padded_vocab_size // tp, h)
        head = {"minimal": [], "norm": [norm], "mlp": [*mlp, norm], "block": [*layer, norm]}
        shapes = layer * self.num_layers
        for _ in self.exits:
            shapes += head[self.run.exits.head]
            shapes += [] if self._exits_are_tied() else [vocabulary]
        embedding_is_the_copy = self.is_first and not model.untie_embeddings_and_output_weights
        shapes += [vocabulary] * self.is_first + [norm] * self.is_last
        shapes += [vocabulary] * (self.holds_shared_matrix() and not embedding_is_the_copy)
        return sum(prod(shape) for shape in shapes)

    def data_sync_ns(self) -> int:
        ranks = self.run.parallel.data_parallel_size
        return _all_reduce_ns(self.profile, 4 * self.parameters(), ranks)

    def peak_bytes(self) -> int:
        """Largest sum of live blocks over one iteration, optimizer step included."""
        optimizer, parameters = self.profile.optimizer, self.parameters()
        self.live = {"state": round(parameters * optimizer.state_bytes_per_parameter)}
        self.peak = 0
        self._touch(round(parameters * optimizer.transient_bytes_per_parameter))
        microbatches = self.run.num_microbatches
        warm_up = min(self.num_stages - 1 - self.stage, microbatches)
        order = ["F"] * warm_up + ["F", "B"] * (microbatches - warm_up) + ["B"] * warm_up
        next_of = {"F": iter(range(microbatches)), "B": iter(range(microbatches))}
        for step in order:
            (self._forward if step == "F" else self._backward)(next(next_of[step]))
        assert set(self.live) == {"state"}, f"leaked {set(self.live)}"
        return self.peak

    def _touch(self, extra_bytes: int = 0) -> None:
        self.peak = max(self.peak, sum(self.live.values()) + extra_bytes)

    def _run_forward(self, name: str, op: OpCost) -> None:
        self.live[name] = op.kept_bytes
        self._touch(op.forward_transient_bytes)

    def _forward(self, microbatch: int) -> None:
        if not self.is_first:
            self.live[f"{microbatch} input"] = self.hidden_bytes
        else:
            self._run_forward(f"{microbatch} embedding", self.op("embedding"))
        for layer in range(self.num_layers):
            self._run_forward(f"{microbatch} layer {layer}", self.op("layer"))
        if self.eager:
            for spot in self.exits:
                self._run_forward(f"{microbatch} exit {spot.depth}", self.exit_op())
        if self.is_last:
            self._run_forward(f"{microbatch} final", self.op("final_head"))

    def _backward(self, microbatch: int) -> None:
        if not self.is_last:
            self.live["received gradient"] = self.hidden_bytes
        self._touch()
        losses = [f"{microbatch} exit {spot.depth}" for spot in self.exits]
        if self.eager:
            losses += [f"{microbatch} final"] * self.is_last
        else:
            for name in losses:
                self._run_forward(name, self.exit_op())
            losses = [f"{microbatch} final"] * self.is_last + losses
        for name in reversed(losses):
            self._touch(
                self.op(
                    "final_head" if "final" in name else f"exit_{self.run.exits.head}"
                ).backward_transient_bytes
            )
            del self.live[name]
            self.live[f"gradient of {name.split(' ', 1)[1]}"] = self.hidden_bytes
        self._backward_through_layers(microbatch)
        self.live = {name: size for name, size in self.live.items() if "gradient" not in name}
        self.live.pop(f"{microbatch} input", None)

    def _backward_through_layers(self, microbatch: int) -> None:
        for layer in reversed(range(self.num_layers)):
            depth = self.first_depth + layer + 1
            top = layer == self.num_layers - 1
            if self.exact_gradients and not top:
                # Summed into the gradient that comes from the layer above.
                for spot in self.exits:
                    if spot.depth >= depth:
                        self.live.pop(f"gradient of exit {spot.depth}", None)
            if not top:
                self.live.pop("gradient of final", None)
                self.live["gradient from above"] = self.hidden_bytes
            self._touch(self.op("layer").backward_transient_bytes)
            del self.live[f"{microbatch} layer {layer}"]
        if self.is_first:
            if self.num_layers == 1:
                self.live.pop("gradient of final", None)
            self.live["gradient from above"] = self.hidden_bytes
            self._touch(self.op("embedding").backward_transient_bytes)
            del self.live[f"{microbatch} embedding"]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _message_ns(profile: OpProfile, size_bytes: int) -> int:
    return _ns(profile.p2p.latency_s) + _ns(size_bytes / profile.p2p.bandwidth_bytes_per_s)


def _all_reduce_ns(profile: OpProfile, size_bytes: int, ranks: int) -> int:
    if ranks == 1:
        return 0
    steps = 2 * (ranks - 1)
    # Two ranks take two steps, each over half of the bytes, for the measured line.
    latency, per_byte = profile.all_reduce.latency_s / 2, 1 / profile.all_reduce.bandwidth_bytes_per_s
    return round((steps * latency + steps * size_bytes / ranks * per_byte) * 1e9)


def modes_of(run: RunSpec) -> tuple[ExitForward, ...]:
    """Where exit forwards may run."""
    return ("deferred", "eager") if run.exits.exit_forward == "auto" else (run.exits.exit_forward,)
