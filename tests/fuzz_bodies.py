"""Requests that are nearly right, by the schema of the protocol, and some that are nothing of the kind."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from eeplan.runtime.decode.modes import ALL_MODES
from eeplan.runtime.serve.protocol import ChatRequest, CompletionRequest

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "x", "catch_up", "pipeline", "margin", "\ud800", "\x00", "e" * 300, "1"]),
    st.text(max_size=5),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["role", "content", "type", "a"]), inner)
    ),
    max_leaves=6,
)
RIGHT: dict[str, Any] = {
    "prompt": st.one_of(
        st.text(max_size=30),
        st.lists(st.integers(-1, 260), max_size=5),
        st.lists(st.text(max_size=5), max_size=3),
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool"]),
                "content": st.text(max_size=20),
            }
        ),
        max_size=3,
    ),
    "model": st.sampled_from([None, "small", "other"]),
    "max_tokens": st.integers(0, 70),
    "max_completion_tokens": st.integers(0, 5),
    "temperature": st.floats(-0.1, 2.1),
    "top_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-1, 300),
    "n": st.integers(0, 20),
    "stream": st.booleans(),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(min_size=1, max_size=2), max_size=5)),
    "seed": st.integers(-(2**64), 2**64),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 25)),
    "top_logprobs": st.integers(-1, 25),
    "echo": st.booleans(),
    "early_exit_threshold": st.one_of(st.floats(-0.1, 1.1), st.lists(st.floats(0, 1), max_size=3)),
    "exit_layers": st.lists(st.sampled_from([2, 4, 5]), max_size=3),
    "decode_mode": st.sampled_from([*ALL_MODES, "none"]),
    "exit_confidence": st.sampled_from(["max_probability", "margin", "entropy", "other"]),
    "recompute_limit": st.integers(-1, 2**40),
    "repetition_penalty": st.floats(0, 1e300),
    "exit_details": st.booleans(),
    "candidates": st.integers(-1, 300),
    "candidate_source": st.sampled_from(["previous_exit", "frequent", "other"]),
    "measure_candidates": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}
PATHS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str, bytes, str]:
    """(method, path, body, content type): most fields right, some anything, now and then bytes."""
    path = draw(st.sampled_from(sorted(PATHS)))
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return (
            draw(st.sampled_from(["POST", "GET", "DELETE"])),
            path,
            draw(st.binary(max_size=50)),
            "application/json",
        )
    fields = set(PATHS[path].model_fields)
    # Now and then fields that have nothing to say, or whose only right value is none.
    names = sorted(fields if kind == 3 else fields & set(RIGHT))
    needed = "prompt" if path == "/v1/completions" else "messages"
    chosen = {needed, *draw(st.lists(st.sampled_from(names), max_size=5))} - {"max_tokens"}
    body = {name: draw(_value(name, draw(st.integers(0, 14)))) for name in sorted(chosen)}
    # Few tokens mostly, so that many requests can be sent.
    body["max_tokens"] = draw(st.one_of(st.integers(1, 3), _value("max_tokens", draw(st.integers(0, 9)))))
    if kind == 1:
        body[draw(st.text(max_size=5))] = draw(ANYTHING)
    if kind == 2:
        del body[needed]
    types = ["application/json", "application/json; charset=utf-8"]
    return "POST", path, json.dumps(body).encode(), draw(st.sampled_from(types))


def _value(name: str, luck: int) -> st.SearchStrategy[Any]:
    return ANYTHING if luck == 0 or name not in RIGHT else RIGHT[name]
