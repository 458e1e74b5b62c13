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

from oracles.naive_links import all_reduce_ns, half_ring_s, line_of, message_ns

from eeplan.profile import OpCost, OpProfile
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import stage_ends_ns
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
        message_ns=tuple(
            message_ns(line_of(run, profile, "p2p", (stage, stage + 1)), naive[0].hidden_bytes)
            for stage in range(stages - 1)
        ),
        output_bytes=(naive[0].hidden_bytes,) * (stages - 1) + (0,),
        transport=run.parallel.p2p_communication,
    )
    ends = stage_ends_ns(one_f_one_b(stages, run.num_microbatches), costs)
    ready = [end + stage.data_sync_ns() for end, stage in zip(ends, naive, strict=True)]
    copies = [time for time, stage in zip(ready, naive, strict=True) if stage.holds_shared_matrix()]
    matrix = 4 * naive[0].matrix_parameters() // naive[0].optimizer_ranks
    pair = line_of(run, profile, "all_reduce", (0, stages - 1))
    synced = max(*ready, max(copies) + all_reduce_ns(pair, matrix, len(copies)))
    layers = run.model.num_layers
    # Needed depths are uniform in (0, layers]; within layer i, the next exit is half a layer less than
    # (exit - i) further on average. Doubled, so that it is an integer.
    marks = sorted({layers, *(spot.depth for spot in exits)})
    overshoot = sum(2 * (min(mark for mark in marks if mark > i) - i) - 1 for i in range(layers))
    return NaiveVerdict(
        split=tuple(split),
        exits=tuple(exits),
        mode=mode,
        iteration_ns=synced
        + max(stage.step_ns() for stage in naive)
        + round(profile.iteration_overhead_s * 1e9),
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
        self._ops: dict[str, OpCost] = {}
        self.exits = sorted((spot for spot in exits if spot.stage == stage), key=lambda spot: spot.depth)
        self.eager = mode == "eager"
        self.exact_gradients = exact_gradients
        """Free an exit's gradient when the backward reaches its layer, instead of after all layers."""
        parallel = run.parallel
        self.num_stages = parallel.pipeline_model_parallel_size
        self.is_first, self.is_last = stage == 0, stage == self.num_stages - 1
        self.num_layers, self.first_depth = split[stage], sum(split[:stage])
        width = 4 if run.training.precision == "fp32" else 2
        tokens = run.training.micro_batch_size * run.training.seq_length
        self.whole_bytes = tokens * run.model.hidden_size * width
        self.sequence_ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        self.hidden_bytes = self.whole_bytes // self.sequence_ranks
        self.optimizer_ranks = parallel.data_parallel_size if parallel.use_distributed_optimizer else 1

    def op(self, name: str) -> OpCost:
        if name not in self._ops:
            self._ops[name] = self._op(name)
        return self._ops[name]

    def _op(self, name: str) -> OpCost:
        cost = next(cost for cost in self.profile.ops if cost.op == name)
        divided = min(_DIVIDED[name] * self.whole_bytes, cost.kept_bytes)
        kept = cost.kept_bytes - divided + divided // self.sequence_ranks
        cost = cost.model_copy(update={"kept_bytes": kept})
        if name == "layer" and self.run.training.recompute_granularity == "selective":
            cost = self._selective(cost)
        return cost

    def _selective(self, cost: OpCost) -> OpCost:
        """The attention core runs twice; its statistics and output are alive for the second time only."""
        model, training = self.run.model, self.run.training
        tp, h = self.run.parallel.tensor_model_parallel_size, model.hidden_size
        tokens = training.micro_batch_size * training.seq_length
        statistics = min(4 * model.num_attention_heads * tokens // tp, cost.kept_bytes)
        # Per token: query, projection, keys, values, gated MLP; causal scores and sums over them.
        kv = model.query_groups * model.head_dim
        rest = 2 * (2 * h * h + 2 * h * kv + 3 * h * model.ffn_size)
        again = cost.forward.mean_s * 2 * training.seq_length * h / (rest + 2 * training.seq_length * h)
        return cost.model_copy(
            update={
                "backward": cost.backward.model_copy(update={"mean_s": cost.backward.mean_s + again}),
                "kept_bytes": cost.kept_bytes - statistics,
                "forward_transient_bytes": cost.forward_transient_bytes + statistics,
                "backward_transient_bytes": cost.backward_transient_bytes
                + statistics
                + self.whole_bytes // tp,
            }
        )

    @property
    def recomputes(self) -> bool:
        return self.run.training.recompute_granularity == "full"

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
        if self.recomputes:
            layer = self.op("layer")
            total += self.num_layers * (
                _ns(layer.backward.mean_s + layer.forward.mean_s) - _ns(layer.backward.mean_s)
            )
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

    def _embedding_is_the_copy(self) -> bool:
        return self.is_first and not self.run.model.untie_embeddings_and_output_weights

    def _shapes(self) -> dict[str, int]:
        """Parameters of one rank: a layer, an exit with a matrix of its own if it has one, a matrix."""
        model, tp = self.run.model, self.run.parallel.tensor_model_parallel_size
        h, ffn, norm = model.hidden_size, model.ffn_size // tp, (model.hidden_size,)
        kv = model.query_groups * (h // model.num_attention_heads) // tp
        mlp = [(2 * ffn, h), (h, ffn), norm]
        layer = [(h // tp, h), (kv, h), (kv, h), (h, h // tp), norm, *mlp]
        vocabulary = [(self.run.padded_vocab_size // tp, h)]
        head = {"minimal": [], "norm": [norm], "mlp": [*mlp, norm], "block": [*layer, norm]}
        exit_shapes = [*head[self.run.exits.head], *([] if self._exits_are_tied() else vocabulary)]
        parts = {"layer": layer, "exit": exit_shapes, "matrix": vocabulary}
        return {name: sum(prod(shape) for shape in shapes) for name, shapes in parts.items()}

    def parameters(self) -> int:
        """Sum over the shapes of all tensors that one rank holds."""
        shapes = self._shapes()
        matrices = self.is_first + (self.holds_shared_matrix() and not self._embedding_is_the_copy())
        return (
            self.num_layers * shapes["layer"]
            + len(self.exits) * shapes["exit"]
            + matrices * shapes["matrix"]
            + self.is_last * self.run.model.hidden_size
        )

    def data_sync_ns(self) -> int:
        """Buckets one after the other, each when its gradients are there; without overlap one at the end."""
        buckets, end = self._buckets(), 0
        if not self.run.parallel.overlap_grad_reduce:
            return self._reduce_ns(self.parameters())
        clock = 0 if self.eager else len(self.exits) * _ns(self.exit_op().forward.mean_s)
        for op, parameters in buckets:
            layer = self.op("layer")
            seconds = op.backward.mean_s
            if op == layer and self.recomputes:
                seconds += layer.forward.mean_s
            clock += _ns(seconds)
            end = max(end, clock) + self._reduce_ns(parameters)
        assert sum(parameters for _, parameters in buckets) == self.parameters()
        return max(end - clock, 0)

    def _buckets(self) -> list[tuple[OpCost, int]]:
        """Ops in backward order with the parameters whose gradients are complete after each."""
        shapes = self._shapes()
        ops = [(self.exit_op(), shapes["exit"], self._exits_are_tied())] * len(self.exits)
        if self.is_last:
            final = (self.op("final_head"), self.run.model.hidden_size, True)
            ops = [*ops, final] if self.eager else [final, *ops]
        ops.reverse()
        copy = shapes["matrix"] if self.holds_shared_matrix() and not self._embedding_is_the_copy() else 0
        buckets = []
        for index, (op, own, ties) in enumerate(ops):
            is_last_user = ties and not any(later for _, _, later in ops[index + 1 :])
            buckets.append((op, own + copy * is_last_user))
        buckets += [(self.op("layer"), shapes["layer"])] * self.num_layers
        return buckets + [(self.op("embedding"), shapes["matrix"])] * self.is_first

    def _reduce_ns(self, parameters: int) -> int:
        ranks = self.run.parallel.data_parallel_size
        pair = line_of(self.run, self.profile, "all_reduce", (self.stage, self.stage))
        if not parameters or ranks == 1:
            return 0
        if not self.run.parallel.use_distributed_optimizer:
            return all_reduce_ns(pair, 4 * parameters, ranks)
        return _ns(half_ring_s(pair, 4 * parameters, ranks))

    def step_ns(self) -> int:
        """The optimizer's step, and an all-gather of what other ranks have updated."""
        optimizer, ranks = self.profile.optimizer, self.optimizer_ranks
        width = 4 if self.run.training.precision == "fp32" else 2
        pair = line_of(self.run, self.profile, "all_reduce", (self.stage, self.stage))
        gather_s = half_ring_s(pair, width * self.parameters(), ranks) if ranks > 1 else 0.0
        return _ns(optimizer.fixed_s + self.parameters() / ranks * optimizer.per_parameter_s + gather_s)

    def peak_bytes(self) -> int:
        """Largest sum of live blocks over one iteration, optimizer step included."""
        optimizer, parameters = self.profile.optimizer, self.parameters()
        # Adam's moments, and beside 16-bit parameters an fp32 copy.
        sharded = 8 if self.run.training.precision == "fp32" else 12
        rest = optimizer.state_bytes_per_parameter - sharded
        self.live = {"state": round(parameters * (rest + sharded / self.optimizer_ranks))}
        self.peak = 0
        self._touch(round(parameters * (optimizer.transient_bytes_per_parameter / self.optimizer_ranks)))
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
            if self.recomputes:
                # The output alone stays; it is the input of what follows.
                kept = self.op("layer").kept_bytes
                self.live[f"{microbatch} layer {layer}"] = min(self.hidden_bytes, kept)
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
            if self.recomputes:
                self._run_forward("again", self.op("layer"))
            self._touch(self.op("layer").backward_transient_bytes)
            self.live.pop("again", None)
            del self.live[f"{microbatch} layer {layer}"]
        if self.is_first:
            if self.num_layers == 1:
                self.live.pop("gradient of final", None)
            self.live["gradient from above"] = self.hidden_bytes
            self._touch(self.op("embedding").backward_transient_bytes)
            del self.live[f"{microbatch} embedding"]


_DIVIDED = {
    "embedding": 1,
    "layer": 4,
    "exit_minimal": 0,
    "exit_norm": 1,
    "exit_mlp": 3,
    "exit_block": 5,
    "final_head": 1,
}
"""Hidden states that each op keeps whole without sequence parallelism: outputs of norms and residual sums."""


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def modes_of(run: RunSpec) -> tuple[ExitForward, ...]:
    """Where exit forwards may run."""
    return ("deferred", "eager") if run.exits.exit_forward == "auto" else (run.exits.exit_forward,)
