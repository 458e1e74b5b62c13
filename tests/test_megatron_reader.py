"""Launch scripts of others, read into run files."""

from __future__ import annotations

import pytest

from eeplan.errors import EeplanError, SchemaError, SpecError
from eeplan.megatron_reader import ScriptRun, read_script

EARLY_EXIT = """#!/bin/bash
# Trains a small model with two exits.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPROC_PER_NODE=8
NODES=${NODES:-2}
TP=1   # no tensor parallelism
PP=4
SAVE_INTERVAL=$(( 24 * 10 ))
TRAIN_ITER=$(( $SAVE_INTERVAL * 3))

DIST_ARGS="
    --nproc_per_node $NPROC_PER_NODE \\
    --nnodes $NODES \\
    --node_rank $RANK \\
"
GPT_ARGS="
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP \\
    --num-layers 24 --hidden-size 2048 --num-attention-heads 32 \\
    --seq-length 2048 --max-position-embeddings 2048 \\
    --sequence-parallel \\
    --micro-batch-size 4 --global-batch-size 2048 \\
    --lr 0.0003 --train-iters $TRAIN_ITER --lr-decay-style cosine --min-lr 3.0e-5 \\
    --weight-decay 1e-1 --lr-warmup-iters 20 --adam-beta1 0.9 --adam-beta2 0.95 \\
    --init-method-std 0.01 --clip-grad 1.0 --bf16 \\
    --disable-bias-linear --use-flash-attn --normalization RMSNorm \\
    --position-embedding-type rope --swiglu \\
"
EE_ARGS="
    --exit-layer-nums 7 13 \\
    --exit-layer-weight 0.25 0.5 \\
    --pre-exit \\
"
torchrun $DIST_ARGS \\
    pretrain_early_exit_gpt.py \\
    $GPT_ARGS \\
    $EE_ARGS \\
    --data-path 0.4 ${DATA_HOME}/one 0.6 ${DATA_HOME}/two \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tok.model --split 990,9,1 \\
    --log-interval 2 --eval-iters 10 --wandb-project P --save $CHECKPOINT 2>&1 | tee log.txt
"""

STOCK = """
GPUS_PER_NODE=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
)
MODEL=(
    --num-layers 30   # ten a stage
    --hidden-size 1024
    --ffn-hidden-size 4096
    --num-attention-heads 16
    --group-query-attention --num-query-groups 4
    --seq-length 1024 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
    --vocab-size 50257
)
TRAINING=(--micro-batch-size 1 --train-samples 6400 --lr 6.0e-5 --lr-warmup-fraction .1 --bf16)
TRAINING+=(--use-distributed-optimizer --recompute-granularity full)
PARALLEL=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel
    --pipeline-model-parallel-layout "Et*7|(t*8|)*2,t*7,L")
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \\
    "${MODEL[@]}" "${TRAINING[@]}" ${PARALLEL[@]} --data-path $1 --some-new-flag 3
"""


def told(script: ScriptRun) -> dict[str, str]:
    return {one.text: one.why for one in script.not_understood}


def test_an_early_exit_script_with_variables() -> None:
    script = read_script(EARLY_EXIT, "script")
    run = script.run
    assert (run.model.num_layers, run.model.hidden_size, run.model.vocab_size) == (24, 2048, 32000)
    assert run.model.ffn_hidden_size == 5440, "Megatron's own default of a gated MLP"
    assert (run.parallel.pipeline_model_parallel_size, run.parallel.data_parallel_size) == (4, 4)
    assert run.training.train_iters == 720
    assert run.training.precision == "bf16"
    assert run.training.adam_eps == 1e-8
    assert run.data.split == "990,9,1"
    assert [(e.layer, e.boundary, e.weight, e.head, e.tied) for e in run.exits.layers] == [
        (7, "before", 0.25, "minimal", True),
        (13, "before", 0.5, "minimal", True),
    ]
    assert [e.depth for e in run.exits.layers] == [6, 12]
    assert [(one.path[-3:], one.weight) for one in run.data.datasets] == [("one", 0.4), ("two", 0.6)]
    assert (run.training.hidden_dropout, run.training.attention_dropout) == (0.1, 0.1), "Megatron's own"
    assert (run.parallel.gpus_per_node, run.parallel.num_nodes) == (8, 2)
    assert not run.parallel.sequence_parallel, "Megatron ignores it without tensor parallelism"
    assert told(script) == {}
    assert any("32000: usual for SentencePieceTokenizer" in text for text in script.assumed)


def test_a_stock_script_with_arrays_and_an_uneven_layout() -> None:
    script = read_script(STOCK, "script", {"1": "data/pile"})
    run = script.run
    assert run.parallel.layer_split == (7, 8, 8, 7)
    assert (run.parallel.tensor_model_parallel_size, run.parallel.data_parallel_size) == (2, 1)
    assert run.model.num_query_groups == 4
    assert run.training.global_batch_size == 1
    assert (run.training.train_iters, run.training.lr_warmup_iters) == (6400, 640)
    assert run.data.data_path == "data/pile"
    assert run.exits.layers == ()
    assert run.training.recompute_granularity == "full"
    assert run.parallel.use_distributed_optimizer
    assert run.parallel.sequence_parallel
    assert run.parallel.gpus_per_node is None, "one node"
    assert told(script) == {
        "--some-new-flag 3": "unknown to eeplan",
    }


def test_a_bare_list_of_flags() -> None:
    flags = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
        --micro-batch-size 2 --lr 1e-3 --train-iters 5 --vocab-size 100"""
    script = read_script(flags, "flags")
    assert script.run.model.ffn_hidden_size == 256
    assert script.run.training.weight_decay == 0.01, "Megatron's default, not eeplan's"
    assert {one.flag for one in script.not_understood} == {
        *("--swiglu", "--normalization", "--position-embedding-type", "--disable-bias-linear"),
    }
    assert any("does not say that it starts" in text for text in script.assumed)
    assert read_script(flags, "flags", vocab_size=500).run.model.vocab_size == 500


def test_exits_inside_a_stage_are_the_same_either_way() -> None:
    after = EARLY_EXIT.replace("--exit-layer-nums 7 13", "--exit-layer-nums 8 14")
    requests = read_script(after, "script").run.exits.layers
    assert [(e.layer, e.boundary) for e in requests] == [(7, "after"), (13, "after")]


def test_weights_that_warm_up() -> None:
    ramp = "--exit-layer-weight-warmup-iters 30 --exit-layer-weight-init 0.125 0.25 \\\n    --pre-exit"
    script = read_script(EARLY_EXIT.replace("--pre-exit", ramp), "script")
    warmup = script.run.exits.loss_weights.warmup
    assert warmup is not None
    assert (warmup.style, warmup.init, warmup.iters) == ("linear", 0.5, 30)
    script = read_script(EARLY_EXIT.replace("--pre-exit", ramp.replace("0.25", "0.5")), "script")
    assert any(one.flag == "--exit-layer-weight-init" for one in script.not_understood)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--num-layers 24", ""), "no --num-layers among the flags"),
        (("--num-layers 24", "--num-layers many"), "--num-layers is 'many'; expected a number"),
        (("--num-layers 24", "--num-layers $L"), "give the variable a value with --define"),
        (("--num-layers 24", "--num-layers 24 25"), "--num-layers has 2 values"),
        (("--num-layers 24", "--num-layers 22"), "is not divisible by"),
        (("--exit-layer-weight 0.25 0.5", "--exit-layer-weight 0.25"), "has 1 values for 2 exits"),
        (("--exit-layer-nums 7 13", "--exit-layer-nums 1 13"), "reads after 0 of 24 layers"),
        (("NPROC_PER_NODE=8", "NPROC_PER_NODE=7"), "14 ranks are not divisible"),
        (("pretrain_early_exit_gpt.py", "'"), "no closing quotation"),
        (("SentencePieceTokenizer", "OwnTokenizer"), "does not say the size of the vocabulary"),
    ],
)
def test_impossible_scripts_are_refused_in_one_line(change: tuple[str, str], message: str) -> None:
    assert change[0] in EARLY_EXIT
    with pytest.raises(EeplanError) as caught:
        read_script(EARLY_EXIT.replace(*change), "script")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_script_is_refused() -> None:
    for text in ("", "echo hello", "\x00\x01", "python train.py"):
        with pytest.raises(SchemaError, match="expected a launch script"):
            read_script(text, "script")


def test_a_layout_of_other_stages_is_refused() -> None:
    with pytest.raises(SpecError, match="has 2 stages, --pipeline-model-parallel-size is 4"):
        read_script(STOCK.replace("Et*7|(t*8|)*2,t*7,L", "Et*15|t*15,L"), "script")


def test_a_variable_that_holds_itself_ends() -> None:
    text = 'X="$X --a 1"\n' + EARLY_EXIT
    assert read_script(text, "script").run.model.num_layers == 24
    with pytest.raises(SpecError):
        read_script(
            EARLY_EXIT.replace("--num-layers 24", "--num-layers $A").replace("PP=4", "PP=4\nA=$A"), "s"
        )


def read_with(flags: str) -> ScriptRun:
    return read_script(STOCK.replace("--recompute-granularity full", flags), "script", {"1": "data/pile"})


def test_flags_of_precision_and_recomputation() -> None:
    half = read_with("--fp16 --initial-loss-scale 65536 --loss-scale-window 500 --hysteresis 3")
    # A script with both trains in bf16, as Megatron refuses to and eeplan must choose.
    assert half.run.training.precision == "bf16"
    half = read_script(STOCK.replace("--bf16", "--fp16 --initial-loss-scale 65536"), "script", {"1": "d"})
    training = half.run.training
    assert (training.precision, training.initial_loss_scale, training.loss_scale) == ("fp16", 65536.0, None)
    assert read_with("--recompute-activations").run.training.recompute_granularity == "selective"
    one = read_with("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert one.run.training.recompute_granularity == "full"
    assert set(told(one)) == {"--some-new-flag 3"}


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("--recompute-granularity full --recompute-method block", "--recompute-method block"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "--recompute-method uniform 4",
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "--recompute-modules core_attn mlp",
        ),
        ("--recompute-granularity half", "--recompute-granularity half"),
    ],
)
def test_other_recomputation_is_pointed_out(flags: str, unread: str) -> None:
    assert set(told(read_with(flags))) == {unread, "--some-new-flag 3"}
