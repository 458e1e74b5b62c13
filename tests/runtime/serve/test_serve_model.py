"""A real model behind the server: the engine's own tokens, fuzzed requests, the page, and many clients."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from chromium import chromium
from fuzz_bodies import bodies
from hypothesis import HealthCheck, given, settings
from serve_cases import Running, running
from tiny_checkpoint import tiny_model

from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.generate import continue_prompt
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.serve.opening import opened
from eeplan.runtime.serve.settings import Limits, Served

PROMPTS = ["def main(", "class A:", "x", "return self", "\u00e4\u00f6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, EarlyExitGPT]]:
    folder = tmp_path_factory.mktemp("served")
    with tiny_model(folder) as found:
        yield folder, found


@pytest.fixture(scope="module")
def served(model: tuple[Path, EarlyExitGPT]) -> Served:
    with opened(model[0], threshold=["0.3"]) as (found, _):
        return found


@pytest.fixture(scope="module")
def server(model: tuple[Path, EarlyExitGPT], served: Served) -> Iterator[Running]:
    engine = LocalEngine(model[1], vocab_size=257, max_running=8)
    limits = Limits(max_waiting=600, max_tokens=64, grace_s=5.0)
    with running(engine, served, limits) as found:
        yield found


def expected(model: EarlyExitGPT, served: Served, prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
    asked = generate_options(**({"threshold": 0.3, "max_new_tokens": tokens} | options))
    found = continue_prompt(model, served.tokenizer, prompt, asked)
    # The protocol has no end token.
    found["tokens"] = [token for token in found["tokens"] if token["id"] != served.tokenizer.eod]
    return found


@pytest.mark.parametrize("mode", ["full", "catch_up", "kv_recompute", "self_speculative"])
def test_answers_are_what_the_model_says_alone(
    server: Running, model: tuple[Path, EarlyExitGPT], served: Served, mode: str
) -> None:
    """Together with others, streamed or not, each gets its own tokens, exits and log-probabilities."""

    def ask(index: int) -> Any:
        body = {"prompt": PROMPTS[index % 5], "max_tokens": 10 + index, "temperature": 0, "logprobs": 2}
        body |= {"decode_mode": mode, "exit_details": True, "stream": index % 2 == 1}
        answer = server.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        chunks = answer.events if body["stream"] else [answer.json]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice["eeplan"]["tokens"]]
        top = [one for choice in choices for one in choice["logprobs"]["top_logprobs"]]
        return "".join(choice["text"] for choice in choices), tokens, top, chunks[-1]["eeplan"]

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, range(10)))
    for index, (text, tokens, top, summary) in enumerate(answers):
        alone = expected(model[1], served, PROMPTS[index % 5], 10 + index, mode=mode)
        assert text == alone["text"]
        assert [token["id"] for token in tokens] == [token["id"] for token in alone["tokens"]]
        assert [token["exit"] for token in tokens] == [token["exit"] for token in alone["tokens"]]
        counts = Counter(token["exit"] for token in alone["tokens"])
        assert summary["exits"] == {name: counts[name] for name in ("exit_2", "exit_4", "final")}
        for token, likely in zip(tokens, top, strict=True):
            # Greedy, so the token itself is the likeliest.
            assert max(likely.values()) == pytest.approx(token["logprob"], abs=1e-5)


def test_a_seed_gives_the_same_text_twice(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 20, "temperature": 1.5, "seed": 11, "n": 2}
    texts = [[c["text"] for c in server.post("/v1/completions", body).json["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    other = server.post("/v1/completions", body | {"seed": 12}).json["choices"]
    assert [choice["text"] for choice in other] != texts[0]


def test_candidates_of_a_request_are_told_in_the_answer(
    server: Running, model: tuple[Path, EarlyExitGPT], served: Served
) -> None:
    body = {"prompt": "def main(", "max_tokens": 30, "temperature": 0, "early_exit_threshold": 0.7}
    asked = {"candidates": 3, "measure_candidates": True}
    answer = server.post("/v1/completions", body | asked).json
    alone = expected(model[1], served, "def main(", 30, threshold=0.7, **asked)
    assert answer["choices"][0]["text"] == alone["text"]
    assert answer["eeplan"]["candidates"] == alone["candidates"]
    assert answer["eeplan"]["candidates"]["refused"] > 0
    assert server.post("/v1/completions", body).json["eeplan"]["candidates"] is None


def test_thresholds_change_where_tokens_leave(server: Running) -> None:
    depths = [
        server.post(
            "/v1/completions",
            {"prompt": "x", "max_tokens": 30, "temperature": 0, "early_exit_threshold": threshold},
        ).json["eeplan"]["mean_depth"]
        for threshold in (0.0, 0.4, 1.0)
    ]
    assert depths[0] == 2.0 < depths[1] < depths[2] == 6.0


def send_fuzzed(server: Running, case: tuple[str, str, bytes, str]) -> int:
    """Send a request and look at its error, if it is one; its status."""
    method, path, data, kind = case
    answer = server.send(method, path, data, {"content-type": kind})
    assert answer.status < 500, (case, answer.body)
    if answer.status >= 400:
        error = answer.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, case
        assert isinstance(error["message"], str), case
        assert error["message"], case
        assert "\n" not in error["message"], case
    return answer.status


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(bodies())
def test_no_request_is_answered_with_a_servers_error(
    server: Running, case: tuple[str, str, bytes, str]
) -> None:
    send_fuzzed(server, case)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_2000_fuzzed_requests_give_no_servers_error(server: Running) -> None:
    counts: Counter[int] = Counter()

    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def send(case: tuple[str, str, bytes, str]) -> None:
        counts[send_fuzzed(server, case)] += 1

    send()
    assert sum(counts.values()) >= 2000
    assert counts[200] > 200, "requests that are right are sent as well"
    print(f"{sum(counts.values())} fuzzed requests, by status: {dict(sorted(counts.items()))}")
    assert server.get("/health").json["status"] == "ok"
    assert server.runner.service().occupied == 0


def test_requests_that_go_wrong_leave_nothing_behind(server: Running) -> None:
    for body in (b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe"):
        assert 400 <= server.post("/v1/completions", body).status < 500
    big = json.dumps({"prompt": "x" * (5 << 20)}).encode()
    assert server.post("/v1/completions", big).status == 413
    assert server.post("/v1/completions", b"[" * 100_000).status == 400
    assert server.send("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}).status == 415
    assert server.send("PUT", "/v1/completions", b"{}", {}).status == 405
    assert server.get("/nowhere").json["error"]["code"] == "not_found"
    assert server.runner.service().occupied == 0


async def stream_many(url: str, count: int, seed: int) -> list[tuple[str, int, str]]:
    """(prompt, tokens asked for, text) of so many streams at once by the official client."""
    rng = random.Random(seed)
    asked = [(rng.choice(PROMPTS), rng.randint(1, 24)) for _ in range(count)]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300.0) as client:

        async def one(prompt: str, tokens: int) -> tuple[str, int, str]:
            text = ""
            stream = await client.completions.create(
                model="small", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            return prompt, tokens, text

        return await asyncio.gather(*(one(*pair) for pair in asked))


def many_streams(server: Running, model: EarlyExitGPT, served: Served, count: int) -> int:
    """Run them, compare each with the model alone; bytes that the process grew by at its largest."""
    alone = {
        (prompt, tokens): expected(model, served, prompt, tokens)["text"]
        for prompt in PROMPTS
        for tokens in range(1, 25)
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for prompt, tokens, text in asyncio.run(stream_many(server.api, count, seed=count)):
        assert text == alone[prompt, tokens]
    assert server.runner.service().occupied == 0
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_60_streams_at_once(server: Running, model: tuple[Path, EarlyExitGPT], served: Served) -> None:
    many_streams(server, model[1], served, 60)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_500_streams_at_once_in_bounded_memory(
    server: Running, model: tuple[Path, EarlyExitGPT], served: Served
) -> None:
    first = many_streams(server, model[1], served, 500)
    again = many_streams(server, model[1], served, 500)
    print(f"500 streams at once: {first >> 20} MiB more at most, clients included; again: {again >> 20} MiB")
    assert first < 400 << 20, "clients and server together"
    assert again < 40 << 20, "a second time takes no more"


def test_the_page_in_a_browser(server: Running, tmp_path: Path) -> None:
    """With keys alone: generate, look at a token, move the threshold, and see the histogram change."""

    def text_of(part: str) -> str:
        return f"document.querySelector({part!r}).textContent"

    with chromium(tmp_path / "profile") as page:
        page.open(f"{server.url}/")
        page.wait_for("document.querySelectorAll('#exits tbody tr').length === 3")
        assert page.run(text_of("#model")) == "small"
        assert page.run("document.getElementById('value').textContent") == "0.30"
        page.run("document.getElementById('tokens').focus()")
        page.press("Enter")
        page.wait_for(f"{text_of('#status')}.startsWith('Done: ')")
        count = page.run("document.querySelectorAll('#text [data-exit]').length")
        assert count > 10
        assert page.run(text_of("#status")) == f"Done: {count} tokens."
        counts = (
            "[...document.querySelectorAll('#exits tbody td:nth-child(2)')].map(c => Number(c.textContent))"
        )
        at_03 = page.run(counts)
        assert sum(at_03) == count
        assert at_03[0] > 0
        assert at_03[2] > 0
        colour = "getComputedStyle(document.querySelector('#text [data-exit=\"0\"]')).backgroundColor"
        assert page.run(colour) == "rgb(191, 227, 247)"
        assert page.run(text_of("#speed")).endswith("tokens/s")
        # From the tokens, by keys: what the focused one says changes.
        page.run("document.querySelector('#text [tabindex=\"0\"]').focus()")
        said = page.run(text_of("#token"))
        assert "confidence" in said
        page.press("ArrowRight")
        page.wait_for(f"{text_of('#token')} !== {json.dumps(said)}")
        # The slider is an ordinary one: 30 steps up from 0.30 by key, and it generates again.
        page.run("document.getElementById('threshold').focus()")
        for _ in range(3):
            page.press("ArrowRight")
        assert page.run(text_of("#value")) == "0.33"
        page.run(
            "{const s = document.getElementById('threshold'); s.value = 1;"
            "s.dispatchEvent(new Event('input')); s.dispatchEvent(new Event('change'));}"
        )
        page.wait_for(f"{text_of('#status')}.startsWith('Done') && {counts}[2] > 0 && {counts}[0] === 0")
        page.scheme("dark")
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        assert page.errors == []
    # Nothing comes from elsewhere, and the page allows nothing else.
    policy = server.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in server.get("/").body.decode().replace("http-equiv", "")


def test_text_and_background_differ_enough(server: Running) -> None:
    """WCAG's 4.5 to 1 for every pair of ink and background, in both schemes."""
    sheet = server.get("/page.css").body.decode()
    for block in sheet.split(":root {")[1:]:
        names = dict(part.strip().split(": ") for part in block.split("}")[0].split(";") if ": " in part)
        colours = {name.removeprefix("--"): value for name, value in names.items() if value.startswith("#")}
        assert len(colours) >= 12
        grounds = [colours[name] for name in colours if name in ("page", "panel") or name[0] == "e"]
        assert all(contrast(colours["ink"], ground) >= 4.5 for ground in grounds)
        for ink in ("quiet", "action", "wrong"):
            assert all(contrast(colours[ink], colours[ground]) >= 4.5 for ground in ("page", "panel")), ink
        assert contrast(colours["action-ink"], colours["action"]) >= 4.5


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
