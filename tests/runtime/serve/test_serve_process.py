"""`eeplan serve` as a process: it says where it is, ends on SIGTERM, and when a stage is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tiny_checkpoint import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("process")
    with tiny_model(found, seq_length=2048):
        return found


@contextlib.contextmanager
def process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server, its address, and the lines that it prints."""
    command = [sys.executable, "-m", "eeplan", "serve", str(folder), "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    address = threading.Event()

    def read() -> None:
        assert started.stderr is not None
        for line in started.stderr:
            lines.append(line)
            if "serving on" in line:
                address.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert address.wait(90), lines
        yield started, re.findall(r"serving on (\S+)", "".join(lines))[0], lines
    finally:
        started.kill()
        started.wait(20)
        reader.join(20)


def stream(url: str, tokens: int) -> http.client.HTTPResponse:
    """An answer under way."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = json.dumps({"prompt": "def main(", "max_tokens": tokens, "stream": True, "temperature": 0})
    connection.request("POST", "/v1/completions", body.encode(), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    return response


def test_sigterm_ends_it_gracefully(folder: Path) -> None:
    with process(folder, "--threshold", "0.3", "--grace", "20") as (server, url, lines):
        assert urlsplit(url).hostname == "127.0.0.1"
        answer = stream(url, 60)
        assert answer.readline().startswith(b"data: ")
        server.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n"), "what runs is finished"
        assert server.wait(30) == 0
    assert any("threshold 0.3, not calibrated" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_a_killed_stage_is_a_clean_end(folder: Path) -> None:
    with process(folder, "--pipeline-size", "2", "--threshold", "0.3") as (server, url, lines):
        answer = stream(url, 1900)
        assert answer.readline().startswith(b"data: ")
        stages = children_of(server.pid)
        assert len(stages) == 1
        began = time.monotonic()
        os.kill(stages[0], signal.SIGKILL)
        rest = answer.read()
        assert b"engine_died" in rest
        assert b"[DONE]" not in rest
        assert unavailable(url)
        assert server.wait(30) == 2
        assert time.monotonic() - began < 30
    assert any("the engine died" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def unavailable(url: str) -> bool:
    """503 as long as it listens, then nothing."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(
            "POST", "/v1/completions", b'{"prompt": "x"}', {"content-type": "application/json"}
        )
        return connection.getresponse().status == 503
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    """Processes that this one started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found
