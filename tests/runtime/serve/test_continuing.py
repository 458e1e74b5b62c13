"""`eeplan generate` and `eeplan chat` beyond one process's text: stop strings, comparing, stages, talking."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_cases import SCRIPT, SERVED, ScriptedEngine
from tiny_checkpoint import tiny_model

from eeplan.cli import main
from eeplan.errors import DataError, DecodeError
from eeplan.runtime.decode.frequent import AskedCandidates
from eeplan.runtime.decode.options import GenerateOptions, generate_options
from eeplan.runtime.decode.requests import TokenEvent
from eeplan.runtime.serve.chat import ChatTemplate, chat_template
from eeplan.runtime.serve.chatting import Conversation
from eeplan.runtime.serve.continuing import continue_on, generate
from eeplan.runtime.serve.opening import default_thresholds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("continued")
    with tiny_model(found):
        yield found


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", str(folder), "--prompt", "def main(", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_stop_text_ends_the_continuation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = asked(folder, capsys, "--threshold", "0.3", "--max-new-tokens", "30")
    stop = whole["text"][8:10]
    cut = asked(folder, capsys, "--threshold", "0.3", "--max-new-tokens", "30", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["stopped"] == "stop_string"
    assert "".join(token["text"] for token in cut["tokens"]) == cut["text"]
    assert main(["generate", str(folder), "--prompt", "x", "--stop", ""]) == 2
    assert "stop is an empty text" in capsys.readouterr().err


def test_the_full_model_to_compare_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = asked(folder, capsys, "--threshold", "0.3", "--max-new-tokens", "20", "--compare-full")
    alone = asked(folder, capsys, "--threshold", "1", "--max-new-tokens", "20")
    assert compared["full"]["text"] == alone["text"]
    assert compared["full"]["speed_up"] > 0
    same = sum(a["id"] == b["id"] for a, b in zip(compared["tokens"], alone["tokens"], strict=True))
    assert compared["full"]["agreement"] == pytest.approx(same / 20)
    assert main(["generate", str(folder), "--prompt", "x", "--compare-full", "--max-new-tokens", "4"]) == 0
    assert "times as fast as the full model" in capsys.readouterr().out


def test_without_a_threshold_nothing_leaves_early_and_it_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "--prompt", "x", "--max-new-tokens", "4"]) == 0
    said = capsys.readouterr()
    assert "threshold 1, nothing leaves early; give a lower one, or let `eeplan calibrate`" in said.err
    assert "final 4" in said.out
    for wrong in ("calibrated", "soon", "1.5"):
        assert main(["generate", str(folder), "--prompt", "x", "--threshold", wrong]) == 2
    assert "no certificate" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"pipeline_size": 2}, {"tensor_size": 2}])
def test_processes_give_the_same_text(folder: Path, sizes: dict[str, int]) -> None:
    options: dict[str, Any] = {"threshold": ["0.3"], "max_new_tokens": 24, "say": print}
    one = generate(folder, "def main(", **options)
    two = generate(folder, "def main(", **sizes, **options)
    assert (two["mode"], two["prompt"]) == ("pipeline", "def main(")
    # One process lists the end token, an engine does not.
    said = [(token["id"], token["exit"]) for token in one["tokens"] if token["id"] != 256]
    assert [(token["id"], token["exit"]) for token in two["tokens"]] == said
    assert len(said) > 10
    with pytest.raises(DecodeError, match="compare-full is for one process"):
        generate(folder, "x", compare_full=True, **sizes, **options)


ASKED = ("--threshold", "0.7", "--max-new-tokens", "30")
WITH_CANDIDATES = (*ASKED, "--candidates", "3", "--measure-candidates")


def test_candidates_and_their_error_from_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = asked(folder, capsys, *ASKED)
    assert plain["candidates"] is None
    found = asked(folder, capsys, *WITH_CANDIDATES)
    facts = found["candidates"]
    assert (facts["number"], facts["source"]) == (3, "previous_exit")
    assert facts["shortlists"] > facts["refused"] > 0
    assert facts["wrong_share"] == facts["wrong"] / facts["refused"]
    if facts["wrong"] == 0:
        assert found["text"] == plain["text"]
    (tmp_path / "some.txt").write_text("def main(argument): return argument\n" * 9)
    command = [*WITH_CANDIDATES, "--frequent-from", str(tmp_path / "some.txt")]
    frequent = asked(folder, capsys, *command)
    assert frequent["candidates"]["source"] == "frequent"
    assert main(["generate", str(folder), "--prompt", "def main(", *command]) == 0
    assert f"; 3 candidates ended {frequent['candidates']['refused']} of" in capsys.readouterr().out


@pytest.mark.long
def test_candidates_on_two_stages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(folder, capsys, *WITH_CANDIDATES)
    on_two = generate(
        folder,
        "def main(",
        threshold=["0.7"],
        max_new_tokens=30,
        candidates=AskedCandidates(3, measured=True),
        pipeline_size=2,
        say=print,
    )
    assert on_two["text"] == found["text"]
    # One process lists the end token, an engine does not.
    if found["stopped"] == "max_new_tokens":
        assert on_two["candidates"] == found["candidates"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--candidates -1", "candidates is -1; expected 0 for none"),
        ("--candidates 1000", "at most the 257 tokens of the vocabulary"),
        ("--candidates 4 --candidate-source luck", "expected one of previous_exit, frequent"),
        ("--candidates 4 --candidate-source frequent", "is not there any more"),
        ("--candidates 4 --frequent-from absent", "absent is no text file"),
        ("--candidates 4 --candidate-source previous_exit --frequent-from x", "leave one of both out"),
        ("--candidates 4 --confidence entropy", "do not bound the entropy"),
        ("--candidates 4 --mode full", "mode 'full' checks no exit"),
        ("--candidates 4 --mode self_speculative", "takes drafts from the whole head"),
        ("--measure-candidates", "give --candidates N as well"),
        ("--candidate-source frequent", "give --candidates N as well"),
        ("--frequent-from x", "give --candidates N as well"),
    ],
)
def test_candidates_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(["generate", str(folder), "--prompt", "x", "--threshold", "0.5", *options.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert message in line


def test_thresholds_of_the_command_line() -> None:
    assert default_thresholds((), None) == (1.0,)
    assert default_thresholds(("0.5", "0.75"), None) == (0.5, 0.75)
    with pytest.raises(DecodeError, match="run `eeplan calibrate`"):
        default_thresholds(("calibrated",), None)
    with pytest.raises(DecodeError, match="expected numbers from 0 to 1"):
        default_thresholds(("calibrated", "0.5"), None)


def conversation(engine: ScriptedEngine, served: Any = SERVED) -> tuple[Conversation, io.StringIO]:
    def options(thresholds: tuple[float, ...]) -> GenerateOptions:
        return generate_options(threshold=thresholds, max_new_tokens=40)

    out = io.StringIO()
    return Conversation(served, engine, options, out, (0.5,)), out


def test_a_conversation_remembers_until_it_is_told_to_forget() -> None:
    engine = ScriptedEngine("Yes.\nUser: more")
    talk, out = conversation(engine)
    talk.run(iter(["Hello", "", "And?", "/reset", "Again", "/quit", "never"]))
    prompts = [bytes(request.prompt).decode() for request in engine.requests.values()]
    assert prompts == [
        "User: Hello\nAssistant:",
        "User: Hello\nAssistant: Yes.\nUser: And?\nAssistant:",
        "User: Again\nAssistant:",
    ]
    shown = out.getvalue()
    assert "no chat template" in shown
    assert shown.count("Yes.") == 3
    assert "User: more" not in shown
    assert engine.running == 0


def test_a_conversation_changes_its_threshold() -> None:
    engine = ScriptedEngine("Yes.")
    talk, out = conversation(engine)
    talk.run(
        iter(["/threshold 0.25", "Hello", "/threshold 7", "/threshold x", "/threshold", "/what", "More"])
    )
    used = [request.options.policy.thresholds for request in engine.requests.values()]
    assert used == [(0.25,), (0.25,)]
    assert out.getvalue().count("error:") == 2


def test_ctrl_c_ends_an_answer_and_keeps_what_is_there() -> None:
    class Interrupted(ScriptedEngine):
        def step(self) -> list[TokenEvent]:
            if self.steps == 5:
                self.steps += 1
                raise KeyboardInterrupt
            return super().step()

    engine = Interrupted("Yes and no.")
    talk, out = conversation(engine)
    talk.run(iter(["Hello", "More"]))
    assert "(stopped)" in out.getvalue()
    assert talk.turns[1]["content"] == "Yes a"
    assert talk.turns[3]["content"] == "Yes and no."
    assert engine.running == 0


def test_a_long_talk_forgets_its_beginning() -> None:
    talk, out = conversation(ScriptedEngine("y" * 30))
    talk.run(iter(["first question", "second question", "third question", "x" * 200]))
    assert "the oldest turn is forgotten" in out.getvalue()
    assert talk.turns[0]["content"] != "first question"
    assert "say less" in out.getvalue()


def test_templates(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps({"chat_template": source}))
    template = chat_template(tmp_path / "tokenizer.json")
    assert template.prompt([{"role": "user", "content": "a<b"}]) == "<user>a<b</user><assistant>"
    assert template.stop == ()
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        refusing.prompt([{"role": "user", "content": ""}])
    for nasty in ("{{ ''.__class__.__mro__ }}", "{% for", "{{ 1 // 0 }}", "{{ messages.append(1) }}"):
        with pytest.raises(DataError):
            ChatTemplate(nasty + "{{ ().__class__.__bases__[0].__subclasses__() }}").prompt([])
    with pytest.raises(DataError, match="role is 'tool'"):
        ChatTemplate(None).prompt([{"role": "tool", "content": ""}])
    (tmp_path / "tokenizer.json").write_text('{"chat_template": 5}')
    with pytest.raises(DataError, match="is no text"):
        chat_template(tmp_path / "tokenizer.json")


def test_an_engine_has_nothing_left_to_do_afterwards() -> None:
    engine = ScriptedEngine()
    options = generate_options(threshold=0.5, max_new_tokens=9)
    result = continue_on(engine, SERVED, [65], options, ["token"])
    assert (result["text"], result["stopped"]) == ("One ", "stop_string")
    assert engine.running == 0
    assert continue_on(engine, SERVED, [65], options)["stopped"] == "max_new_tokens"
    whole = continue_on(engine, SERVED, [65], generate_options(threshold=0.5, max_new_tokens=99))
    assert (whole["text"], whole["stopped"]) == (SCRIPT, "end_of_text")


def test_the_chat_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(folder), "--threshold", "0.3", "--max-new-tokens", "5"]) == 0
    assert "mode catch_up" in capsys.readouterr().out
    assert main(["chat", str(folder), "--temperature", "-1"]) == 2
