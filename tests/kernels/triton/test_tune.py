"""The tile table is what `bench.tune` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tune
from bench.tune import PROGRAMS, Key, Workload, measured_programs, write_table
from kernels import tile_table
from kernels.heuristics import DeviceModel, TileTable, target_items
from tests.kernels.triton.conftest import Worker

HOPPER = DeviceModel(num_sms=132, capability=(9, 0))


def test_what_is_written_is_the_table(tmp_path: Path) -> None:
    path = tmp_path / "tile_table.py"
    checked_in = Path(tile_table.__file__).read_bytes()
    path.write_bytes(checked_in)
    thresholds = tile_table.PROGRAMS_PER_SM, tile_table.MIN_SHARED_SAVING
    write_table(tile_table.TILES, tile_table.MEASURED, *thresholds, path)
    assert path.read_bytes() == checked_in
    write_table(tile_table.TILES, frozenset([90]), {80: 8, 90: 4, 100: 8}, {80: 1, 90: 2, 100: 3}, path)
    text = path.read_text("utf-8")
    assert "frozenset([90])" in text
    assert "PROGRAMS_PER_SM: dict[int, int] = {80: 8, 90: 4, 100: 8}" in text
    assert "MIN_SHARED_SAVING: dict[int, int] = {80: 1, 90: 2, 100: 3}" in text


@pytest.mark.parametrize("key", [(80, "decode", 64, 2), (90, "decode", 64, 1)], ids=str)
def test_rows_that_nobody_measured_are_chosen_by_what_compiles_well(key: Key, compiler: Worker) -> None:
    """Of all head sizes of the row: the tile for heads of 128 in 8 bits once spilled with heads of 80."""
    if key[0] not in tile_table.MEASURED:
        assert compiler(tune._static_row, key) == (key, tile_table.TILES[key])


def test_the_number_of_programs_is_that_of_the_least_bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the best sum: a batch of a dozen that is twice as slow as it could be is what the cut is to prevent."""
    cuts: set[int] = set()

    def run(self: Workload, device: DeviceModel, key: Key, tiles: TileTable, shares: bool) -> float:
        assert not shares
        cuts.add(target_items(device, 8, 1))
        slow = {2: 3.0, 4: 1.1, 8: 1.0, 16: 1.2}[device.programs_per_sm]
        if device.programs_per_sm == 8 and self.num_seqs == 12:
            slow = 2.0
        return self.num_seqs * slow

    monkeypatch.setattr(Workload, "run", run)
    assert measured_programs(HOPPER, tile_table.TILES) == 4
    assert cuts == {-(-count * 132 // 8) for count in PROGRAMS}
