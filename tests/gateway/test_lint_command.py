"""`radixgate lint`: from a file to a line that says what to move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main


def test_a_time_stamp_in_a_system_prompt_is_pointed_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "system.txt"
    path.write_text("You are kind. Current time: 14:22. Be brief.")
    assert main(["lint", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "system, character 22: time of day: 'time: 14:22'" in shown
    assert "11 characters behind it" in shown


def test_a_request_is_read_in_the_order_of_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents come before the history: what is volatile in one breaks all turns."""
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "I am bob@example.org"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Now 1767225600?"},
        ],
        "documents": [{"id": "a", "text": "Printed 2026-03-01 14:22."}],
    }
    path = tmp_path / "body.json"
    path.write_text(json.dumps(body))
    assert main(["lint", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["where"], each["kind"]) for each in found] == [
        ("documents[0]", "date and time"),
        ("messages[1]", "name or address of a user"),
    ]


def test_a_stable_prompt_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "system.txt"
    path.write_text("You are kind. Be brief.")
    assert main(["lint", str(path)]) == 0
    assert "nothing" in capsys.readouterr().out
