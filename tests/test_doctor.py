"""Findings of the doctor, once for real and each kind of trouble by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eeplan import doctor
from eeplan.cli import main
from eeplan.errors import LaunchError
from eeplan.views import doctor_table, plain

GIB = 2**30


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    by_name = {check["name"]: check for check in result["checks"]}
    assert {"python", "cores", "memory", "disk", "import torch", "import megatron.core"} <= set(by_name)
    assert by_name["two processes"]["status"] == "ok"
    assert "exchange tensors over" in by_name["two processes"]["detail"]
    assert all(check["remedy"] for check in result["checks"] if check["status"] != "ok")
    assert "two processes" in plain(doctor_table(result["checks"]))


def test_a_failed_check_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = doctor.Check("python", "fail", "3.9", "use Python 3.11")
    monkeypatch.setattr(doctor, "python_check", lambda version: bad)
    for name in ("import_check", "processes_check"):
        monkeypatch.setattr(doctor, name, lambda *args: doctor.Check("x", "ok", ""))
    assert main(["doctor"]) == 1
    assert "fail  python" in capsys.readouterr().out


def test_python_of_another_version() -> None:
    assert doctor.python_check((3, 11)).status == "ok"
    assert doctor.python_check((3, 12)).status == "fail"


def test_packages_against_constraints() -> None:
    good = dict.fromkeys(doctor._MAIN_PACKAGES, "1.0")
    pinned = dict(good)
    assert [c.status for c in doctor.package_checks(pinned, good)] == ["ok"]
    local_build = good | {"torch": "1.0+cpu"}
    assert [c.status for c in doctor.package_checks(pinned, local_build)] == ["ok"]
    older = doctor.package_checks(pinned, good | {"numpy": "0.9"})
    assert [(c.name, c.status, c.detail) for c in older] == [
        ("numpy", "warn", "0.9 installed, tested with 1.0")
    ]
    without = {name: v for name, v in good.items() if name not in ("torch", "numpy")}
    assert [(c.name, c.status) for c in doctor.package_checks(pinned, without)] == [
        ("numpy", "fail"),
        ("torch", "warn"),
    ]


def test_the_installation_is_the_pinned_one() -> None:
    """The test environment itself is built from constraints.txt."""
    pinned = doctor.pinned_versions()
    assert "torch" in pinned
    assert [c.detail for c in doctor.package_checks(pinned, doctor.installed_versions())] == [
        f"{len(doctor._MAIN_PACKAGES)} packages, all as in constraints.txt"
    ]


def test_small_machines_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.cores_check(2).status == "ok"
    assert doctor.cores_check(1).status == "warn"
    assert doctor.memory_check(8 * GIB).status == "ok"
    assert doctor.memory_check(GIB).status == "warn"
    assert doctor.memory_check(None).status == "warn"
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 2**62)
    assert doctor.disk_check(tmp_path).status == "warn"


def test_a_module_that_breaks_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_binary.py").write_text("raise OSError('libfoo.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = doctor.import_check("broken_binary")
    assert (check.status, check.detail) == ("fail", "OSError: libfoo.so: cannot open")
    assert doctor.import_check("not_there_at_all").status == "warn"


def test_processes_that_cannot_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise LaunchError("rank 1 ended with exit code 1")

    monkeypatch.setattr("eeplan.runtime.launch.launch", fail)
    check = doctor.processes_check()
    assert (check.status, check.detail) == ("fail", "rank 1 ended with exit code 1")
    assert check.remedy
