"""Megatron-LM's defaults, and which of its flags eeplan can pass over or cannot follow."""

from __future__ import annotations

DEFAULTS: dict[str, str] = {
    "--make-vocab-size-divisible-by": "128",
    "--rotary-base": "10000",
    "--norm-epsilon": "1e-05",
    "--init-method-std": "0.02",
    "--pipeline-model-parallel-size": "1",
    "--tensor-model-parallel-size": "1",
    "--hidden-dropout": "0.1",
    "--attention-dropout": "0.1",
    "--seed": "1234",
    "--min-lr": "0.0",
    "--lr-warmup-iters": "0",
    "--lr-decay-style": "linear",
    "--weight-decay": "0.01",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.999",
    "--adam-eps": "1e-08",
    "--clip-grad": "1.0",
    "--log-interval": "100",
    "--eval-iters": "100",
    "--split": "969,30,1",
}
"""Megatron's own, for flags of ``FIELDS`` that a script leaves out."""

TOKENIZER_SIZES = {
    "GPT2BPETokenizer": 50257,
    "SentencePieceTokenizer": 32000,
    "GPTSentencePieceTokenizer": 32000,
    "Llama2Tokenizer": 32000,
}
"""Vocabulary that goes with a tokenizer type, as usual; used and reported when no size is given."""

IRRELEVANT_PREFIXES = (
    *(
        "--save",
        "--load",
        "--log-",
        "--tensorboard-",
        "--wandb-",
        "--eval-interval",
        "--exit-on-",
        "--exit-dur",
    ),
    *(
        "--exit-interval",
        "--no-load-",
        "--no-save-",
        "--ckpt-",
        "--dist-ckpt-",
        "--distributed-",
        "--num-workers",
    ),
    *("--use-flash-attn", "--attention-backend", "--attention-softmax", "--transformer-impl", "--use-mcore-"),
    *("--no-masked-", "--no-bias-", "--no-rope-fusion", "--no-persist-", "--no-gradient-acc", "--timing-"),
    *("--max-position-embeddings", "--tokenizer-type", "--optimizer", "--data-cache-path", "--mock-data"),
    *(
        "--use-checkpoint-args",
        "--finetune",
        "--master",
        "--local",
        "--rdzv",
        "--node",
        "--standalone",
        "--async-save",
    ),
    *(
        "--manual-gc",
        "--no-mmap",
        "--override-opt",
        "--use-checkpoint-opt",
        "--seq-len-",
    ),
)
"""Beginnings of flags that change neither model nor plan as far as eeplan goes."""

UNSUPPORTED = {
    "--num-experts": "mixture of experts",
    "--num-layers-per-virtual-pipeline-stage": "interleaved schedule",
    "--num-virtual-stages-per-pipeline-rank": "interleaved schedule",
    "--context-parallel-size": "context parallelism",
    "--expert-model-parallel-size": "expert parallelism",
    "--overlap-param-gather": "overlapped parameter gathering",
    "--use-dynamic-exit-layer-weight": "loss weights per token",
    "--tune-exit": "tuning exits of a frozen model",
    "--lr-decay-iters": "a decay shorter or longer than the training; eeplan decays over train_iters",
    "--backward-forward-ratio": "EE-LLM's guess for the fill; eeplan simulates",
}
"""Flags with a bearing on the plan that a run file cannot express."""
