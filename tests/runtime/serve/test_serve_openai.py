"""The official client, unchanged, against a scripted engine: what it gets is what the protocol promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_cases import SCRIPT, Running, ScriptedEngine, running

PLAIN_END = SCRIPT.index("\nUser:")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Running]:
    with running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert [model.id for model in models.data] == ["fake"]
    found = client.models.retrieve("fake")
    assert found.owned_by == "eeplan"
    facts: Any = found.model_extra
    assert facts["eeplan"]["exit_layers"] == [2, 4]
    assert facts["eeplan"]["early_exit_threshold"] == [0.5]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="Say", max_tokens=9)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == SCRIPT[:9]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        9,
        12,
    )
    facts: Any = answer.model_extra
    assert facts["eeplan"]["exits"] == {"exit_2": 3, "exit_4": 0, "final": 6}
    assert facts["eeplan"]["mean_depth"] == pytest.approx((3 * 2 + 6 * 6) / 9)


def test_completion_ends_at_the_end_of_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="Say", max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (SCRIPT, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(SCRIPT.encode())


@pytest.mark.parametrize("stop", ["after", ["zebra", "after", "an"], "another", "O", " "])
def test_stop_strings_end_the_text(client: openai.OpenAI, engine: ScriptedEngine, stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = SCRIPT[: min(SCRIPT.index(one) for one in stops if one in SCRIPT)]
    whole = client.completions.create(model="fake", prompt="Say", max_tokens=60, stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    chunks = list(
        client.completions.create(model="fake", prompt="Say", max_tokens=60, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert engine.running == 0, "the sequence is dropped"


def test_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="Say", max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == SCRIPT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(SCRIPT.encode())
    assert len({chunk.id for chunk in chunks}) == 1
    without = list(client.completions.create(model="fake", prompt="Say", max_tokens=3, stream=True))
    assert all(chunk.usage is None for chunk in without)


def test_echo_and_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "cde"], max_tokens=3, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["abOne", "abOne", "cdeOne", "cdeOne"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    streamed = ["", ""]
    for chunk in client.completions.create(
        model="fake", prompt="ab", max_tokens=3, n=2, echo=True, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == ["abOne", "abOne"]


def test_prompts_of_tokens(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=1)
    assert engine.requests[len(engine.requests) - 1].prompt == (1, 2, 3)
    answer = client.completions.create(model="fake", prompt=[[65], [66, 67]], max_tokens=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["AO", "BCO"]


def test_logprobs(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer = client.completions.create(
            model="fake", prompt="Say", max_tokens=4, logprobs=2, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        found = [chunk.choices[0].logprobs for chunk in chunks]
        assert [token for one in found for token in one.tokens] == ["O", "n", "e", " "]
        assert [offset for one in found for offset in one.text_offset] == [0, 1, 2, 3]
        assert found[0].token_logprobs[0] == -0.25
        assert found[0].top_logprobs[0] == {"O": -0.25, "P": -1.25}
    assert client.completions.create(model="fake", prompt="S", max_tokens=1).choices[0].logprobs is None


def test_bytes_that_are_no_text_have_names(client: openai.OpenAI) -> None:
    at = SCRIPT.index("\u00e4")
    answer = client.completions.create(model="fake", prompt="Say", max_tokens=at + 2, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[-2:] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert answer.choices[0].text.endswith("\u00e4")
    cut = client.completions.create(model="fake", prompt="Say", max_tokens=at + 1)
    assert cut.choices[0].text == SCRIPT[:at] + "\ufffd"


def test_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    # Plain turns end where the user would speak.
    assert answer.choices[0].message.content == SCRIPT[:PLAIN_END]
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(engine.requests[len(engine.requests) - 1].prompt).decode()
    assert prompt == "System: Be brief.\nUser: Hello\nAssistant:"


def test_chat_stream_with_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=5,
        n=2,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert roles.count("assistant") == 2
    texts, tokens = ["", ""], [[], []]
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.logprobs and choice.logprobs.content:
            tokens[choice.index] += [one.token for one in choice.logprobs.content]
            assert len(choice.logprobs.content[0].top_logprobs) == 3
    assert texts == [SCRIPT[:5]] * 2
    assert tokens == [list(SCRIPT[:5])] * 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_details_of_every_token(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"exit_details": True, "decode_mode": "full", "exit_layers": [4]}
    answer = client.completions.create(model="fake", prompt="Say", max_tokens=6, extra_body=asked)
    facts: Any = answer.choices[0].model_extra
    tokens = facts["eeplan"]["tokens"]
    assert [token["exit"] for token in tokens] == ["exit_2", "final", "final"] * 2
    assert tokens[0] | {"latency_s": 0.0} == {
        "text": "O",
        "id": ord("O"),
        "exit": "exit_2",
        "depth": 2,
        "confidence": 0.75,
        "logprob": -0.25,
        "latency_s": 0.0,
        "was_draft": False,
    }
    assert tokens[0]["latency_s"] > 0
    whole: Any = answer.model_extra
    assert whole["eeplan"]["decode_mode"] == "full"


def test_fields_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(
        model="fake",
        prompt="Say",
        max_tokens=2,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        n=2,
        extra_body={
            "early_exit_threshold": [0.25, 0.75],
            "decode_mode": "kv_recompute",
            "exit_confidence": "margin",
            "recompute_limit": 3,
            "first_early_token": 2,
            "top_k": 5,
            "repetition_penalty": 1.5,
        },
    )
    first, second = (engine.requests[len(engine.requests) - i].options for i in (2, 1))
    assert first.policy.thresholds == (0.25, 0.75)
    assert first.policy.confidence == "margin"
    assert (first.mode, first.recompute_limit, first.policy.first_early_token) == ("kv_recompute", 3, 2)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 5)
    assert first.sampling.repetition_penalty == 1.5
    assert (first.seed, second.seed) == (7, 8)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="Say", temperature=9)
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.completions.create(model="gpt-4", prompt="Say")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="has 129 tokens") as long:
        client.completions.create(model="fake", prompt="x" * 129)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="mode is 'warp'; expected one of"):
        client.completions.create(model="fake", prompt="Say", extra_body={"decode_mode": "warp"})
    with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported"):
        client.completions.create(model="fake", prompt="Say", frequency_penalty=1.0)
    with pytest.raises(openai.BadRequestError, match="wings: unknown field"):
        client.completions.create(model="fake", prompt="Say", extra_body={"wings": 2})


def test_the_asynchronous_client(server: Running) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                text = ""
                stream = await client.completions.create(
                    model="fake", prompt="Say", max_tokens=10 + index, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(index) for index in range(10)))

    assert asyncio.run(ask()) == [SCRIPT[: 10 + index] for index in range(10)]
