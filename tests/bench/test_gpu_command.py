"""The GPU's one command: whatever its parts do, there is a report, and it says which targets are met."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from bench import targets
from bench.gpu import PARTS, Part, run_all, split_figures

GOOD_KERNELS: dict[str, object] = {
    "decode_copy_share": {str(batch): 0.9 for batch in targets.DECODE_BATCHES},
    "prefill_share_of_flash": {"8k on nothing": 0.95, "8k on 24k": 0.91, "200 on 6k": 0.3},
    "shared_prefix_speedup": 5.5,
    "store_share": 0.92,
    "copy_share": 0.93,
    "gather_share": 0.94,
    "scatter_share": 0.95,
}
GOOD_ENGINE: dict[str, object] = {"device_share": 0.95, "host_ms": 3.0, "device_ms": 11.0, "warm_share": 0.1}


def test_the_report_has_every_part_also_those_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        Part("kernels", ("-c", "print('a table'); print('{\"shared_prefix_speedup\": 6}')"), 60),
        Part("bad", ("-c", "print('it broke'); raise SystemExit(3)"), 60),
        Part("absent", ("-c", "print('never run')"), 60, needs=("sys", "no_such_module")),
        Part("endless", ("-c", "import time; print('begun'); print('{\"a\": 1}'); time.sleep(600)"), 1.5),
        Part("late", ("-c", "import sys; print('{\"a\": 2}'); print('a warning', b'\\xff', file=sys.stderr)"), 60),
    )
    assert not run_all(parts, tmp_path, tmp_path / "out", "a GPU")
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["gpu"] == "a GPU"
    assert (report["kernels"]["passed"], report["kernels"]["figures"]) == (True, {"shared_prefix_speedup": 6})
    assert (report["bad"]["passed"], report["bad"]["figures"]) == (False, {})
    assert (report["endless"]["passed"], report["endless"]["figures"]) == (False, {"a": 1})
    assert (report["late"]["passed"], report["late"]["figures"]) == (True, {"a": 2})
    assert report["absent"]["passed"] is None
    assert [row["verdict"] for row in report["targets"]] == [
        "not measured", "not measured", "met", "not measured", "not measured", "not measured",
    ]  # fmt: skip
    table = (tmp_path / "out" / "gpu.txt").read_text()
    texts = ("a table", "it broke", "begun", "stopped after", "no_such_module", "a warning", "NOT MEASURED")
    assert all(text in table for text in texts)
    assert "never run" not in table
    printed = capsys.readouterr().out
    assert "==> bad: FAILED" in printed
    assert printed.count("NOT MEASURED") == 5


def test_each_part_leaves_a_report_behind(tmp_path: Path) -> None:
    """What ends the command itself costs the parts that have not run, and no others."""
    read = f"print(open({str(tmp_path / 'out' / 'gpu.json')!r}).read())"
    parts = (Part("first", ("-c", "print('{\"a\": 1}')"), 60), Part("second", ("-c", read), 60))
    assert run_all(parts, tmp_path, tmp_path / "out", "a GPU")
    text = (tmp_path / "out" / "gpu.txt").read_text()
    assert '"a": 1' in text


def test_the_end_of_a_part_is_that_of_its_workers(tmp_path: Path) -> None:
    worker = f"import os, time; open({str(tmp_path / 'worker')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(600)"
    assert not run_all((Part("endless", ("-c", command), 2.0),), tmp_path, tmp_path / "out", "a GPU")
    pid = int((tmp_path / "worker").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError("the worker went on")


def test_the_last_line_of_figures_is_taken_whatever_comes_with_it() -> None:
    figures, text = split_figures('one\n{"a": 1}\n{"a": 2}\n{broken\n[3]\nnull\ntwo {"a": 4}\n')
    assert figures == {"a": 2}
    assert text == 'one\n{broken\n[3]\nnull\ntwo {"a": 4}'
    assert split_figures("") == ({}, "")


def test_its_limits_end_within_eight_minutes() -> None:
    assert 400 < sum(part.seconds for part in PARTS) < 480


def verdicts(kernels: dict[str, object], engine: dict[str, object]) -> list[str]:
    return [row.verdict for row in targets.rows(kernels, engine)]


def test_every_target_has_a_row_with_figure_and_verdict() -> None:
    rows = targets.rows(GOOD_KERNELS, GOOD_ENGINE)
    assert [row.verdict for row in rows] == ["met"] * 6
    assert "batch 12 90.0%" in rows[0].figure
    assert rows[1].figure == "8k on nothing 95.0%, 8k on 24k 91.0%"
    assert rows[4].figure == "kernels 95.0%, host 3.0 ms, of the device's 11.0 ms"
    text = targets.to_text(rows)
    assert len({len(line) for line in text.splitlines()}) == 1
    json.dumps(targets.to_json(rows))


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert verdicts({}, {}) == ["not measured"] * 6
    assert verdicts({"decode_copy_share": None, "copy_share": "fast"}, {"device_share": None}) == ["not measured"] * 6
    assert verdicts({"decode_copy_share": {"1": 0.99}}, {})[0] == "not measured"
    assert verdicts({"shared_prefix_speedup": float("nan")}, {})[2] == "not measured"


@pytest.mark.parametrize(
    ("row", "kernels", "engine"),
    [
        (0, {"decode_copy_share": {"12": 0.84}}, {}),
        (1, {"prefill_share_of_flash": {"8k on 24k": 0.89}}, {}),
        (2, {"shared_prefix_speedup": 4.9}, {}),
        (3, {"gather_share": 0.89}, {}),
        (4, {}, {"device_share": 0.89}),
        (4, {}, {"device_share": 0.95, "host_ms": 12.0, "device_ms": 11.0}),
        (5, {}, {"warm_share": 0.13}),
    ],
)
def test_one_figure_that_is_not_good_enough_misses_the_target(
    row: int, kernels: dict[str, object], engine: dict[str, object]
) -> None:
    assert verdicts(kernels, engine)[row] == "missed"
    found = verdicts(GOOD_KERNELS | kernels, GOOD_ENGINE | engine)
    assert found == ["missed" if index == row else "met" for index in range(6)]


def test_wrong_results_stand_beside_the_verdicts() -> None:
    assert targets.warnings({"checks_failed": {}}, {"sections_failed": {"decode": "x"}}) == []
    assert targets.warnings({"checks_failed": {"int8 KV": "x"}}, {"sections_failed": {"check": "x"}}) == [
        "WRONG RESULTS: kernels, int8 KV",
        "WRONG RESULTS: the engine's answers",
    ]
