"""One contract for both slabs, and what only a file can suffer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.tiers.disk_slab import FORMAT, PAGE, DiskSlab, Manifest, read_manifest
from engine.tiers.host_slab import HostSlab
from engine.tiers.slab import Slab, SlabError, SlabReadError

BYTES = 5000  # no multiple of a page
KEYS = [bytes([n]) * 16 for n in range(4)]


def payload(seed: int) -> memoryview:
    return memoryview(bytes((seed * 31 + n) % 251 for n in range(BYTES)))


def host(_: Path) -> Slab:
    return HostSlab(4, BYTES)


def disk(directory: Path) -> Slab:
    return DiskSlab(directory / "kv" / "f.slab", "f", 4, BYTES)


@pytest.fixture(params=[host, disk])
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slab]:
    make: Callable[[Path], Slab] = request.param
    slab = make(tmp_path)
    yield slab
    slab.close()


def read(slab: Slab, number: int, key: bytes, checksum: int) -> bytes:
    into = memoryview(bytearray(BYTES))
    slab.read(number, into, key, checksum)
    return bytes(into)


def test_what_was_written_is_read_again(slab: Slab) -> None:
    sums = [slab.write(number, payload(number), KEYS[number]) for number in range(4)]
    for number in (3, 0, 2, 1):
        assert read(slab, number, KEYS[number], sums[number]) == payload(number)


def test_the_last_write_holds_and_its_neighbours_stay(slab: Slab) -> None:
    for number in range(4):
        slab.write(number, payload(number), KEYS[number])
    checksum = slab.write(1, payload(9), KEYS[1])
    assert read(slab, 1, KEYS[1], checksum) == payload(9)
    assert read(slab, 0, KEYS[0], slab.write(0, payload(0), KEYS[0])) == payload(0)


def test_another_blocks_intact_payload_is_not_taken_for_ones_own(slab: Slab) -> None:
    """A slot that was given to another block: the payload is whole, only not the one that was promised."""
    checksum = slab.write(0, payload(1), KEYS[0])
    slab.write(0, payload(1), KEYS[1])
    with pytest.raises(SlabReadError):
        read(slab, 0, KEYS[1], checksum)
    slab.write(0, payload(2), KEYS[1])
    with pytest.raises(SlabReadError):
        read(slab, 0, KEYS[0], checksum)


def test_a_cleared_slot_holds_nothing_any_more(slab: Slab) -> None:
    checksum = slab.write(2, payload(1), KEYS[2])
    slab.clear(2)
    with pytest.raises(SlabReadError):
        read(slab, 2, KEYS[2], checksum)


def test_a_slot_that_was_never_written_cannot_be_read(slab: Slab) -> None:
    with pytest.raises(SlabReadError):
        read(slab, 3, KEYS[3], 12345)


# ---------------------------------------------------------------------- files


def opened(tmp_path: Path, fingerprint: str = "f", num_slots: int = 4) -> DiskSlab:
    return DiskSlab(tmp_path / "f.slab", fingerprint, num_slots, BYTES)


def test_the_file_survives_its_process_and_names_its_fingerprint_in_clear(tmp_path: Path) -> None:
    first = opened(tmp_path)
    checksum = first.write(1, payload(1), KEYS[1])
    first.close()
    second = opened(tmp_path)
    assert second.slab_id == first.slab_id
    assert read(second, 1, KEYS[1], checksum) == payload(1)
    assert b'"fingerprint":"f"' in (tmp_path / "f.slab").read_bytes()[:PAGE]
    assert (tmp_path / "f.slab").stat().st_mode & 0o777 == 0o600
    second.close()


def test_a_file_in_use_is_refused(tmp_path: Path) -> None:
    """Two engines over one file would overwrite each other's blocks."""
    first = opened(tmp_path)
    with pytest.raises(SlabError, match="in use"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_file_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    slab = opened(tmp_path)
    slab.close()
    newer = Manifest(radixgate_slab=FORMAT + 1, fingerprint="f", slab_id="x", block_bytes=BYTES, num_slots=4, host="h")
    path = tmp_path / "f.slab"
    path.write_bytes(newer.sealed() + b"somebody's blocks")
    with pytest.raises(SlabError, match=f"format {FORMAT + 1}"):
        opened(tmp_path)
    assert path.read_bytes().endswith(b"somebody's blocks")


@pytest.mark.parametrize(("fingerprint", "num_slots"), [("g", 4), ("f", 5)])
def test_a_file_of_another_model_or_size_is_started_over_under_a_new_id(
    tmp_path: Path, fingerprint: str, num_slots: int
) -> None:
    """Under the old id, entries would lead into slots that lie elsewhere now."""
    first = opened(tmp_path)
    checksum = first.write(1, payload(1), KEYS[1])
    first.close()
    second = opened(tmp_path, fingerprint, num_slots)
    assert second.slab_id != first.slab_id
    with pytest.raises(SlabReadError):
        read(second, 1, KEYS[1], checksum)
    second.close()


@pytest.mark.parametrize("position", [0, 1, 20, 60, PAGE - 1])
def test_a_bit_that_flips_in_the_manifest_starts_the_file_over_or_changes_nothing(
    tmp_path: Path, position: int
) -> None:
    first = opened(tmp_path)
    first.close()
    path = tmp_path / "f.slab"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    assert read_manifest(bytes(content[:PAGE])) is None
    second = opened(tmp_path)
    assert second.slab_id != first.slab_id
    second.close()


SLOT_BYTES = -(-BYTES // PAGE) * PAGE


@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize("offset", [0, 1, BYTES // 2, BYTES - 1])
def test_a_bit_that_flips_in_a_payload_is_noticed_in_that_slot_only(tmp_path: Path, slot: int, offset: int) -> None:
    slab = opened(tmp_path)
    sums = [slab.write(number, payload(number), KEYS[number]) for number in range(4)]
    with open(tmp_path / "f.slab", "r+b") as file:
        file.seek(PAGE + slot * SLOT_BYTES + offset)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for number in range(4):
        if number == slot:
            with pytest.raises(SlabReadError):
                read(slab, number, KEYS[number], sums[number])
        else:
            assert read(slab, number, KEYS[number], sums[number]) == payload(number)
    slab.close()


@pytest.mark.parametrize("size", [0, 10, PAGE, PAGE + 1, PAGE + BYTES - 1, PAGE + 2 * SLOT_BYTES + 7])
def test_a_file_that_was_cut_off_gives_what_is_whole_and_misses(tmp_path: Path, size: int) -> None:
    slab = opened(tmp_path)
    sums = [slab.write(number, payload(number), KEYS[number]) for number in range(4)]
    os.truncate(tmp_path / "f.slab", size)
    for number in range(4):
        if PAGE + number * SLOT_BYTES + BYTES <= size:
            assert read(slab, number, KEYS[number], sums[number]) == payload(number)
        else:
            with pytest.raises(SlabReadError):
                read(slab, number, KEYS[number], sums[number])
    slab.close()
    opened(tmp_path).close()


def test_a_full_disk_is_an_error_of_that_write_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = opened(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        slab.write(0, payload(0), KEYS[0])
    monkeypatch.undo()
    assert read(slab, 0, KEYS[0], slab.write(0, payload(0), KEYS[0])) == payload(0)
    slab.close()


def test_writes_that_the_kernel_cuts_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = opened(tmp_path)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:700]], offset))
    assert read(slab, 0, KEYS[0], slab.write(0, payload(3), KEYS[0])) == payload(3)
    slab.close()


def test_a_place_that_cannot_be_written_is_a_slab_error(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file where a directory should be")
    with pytest.raises(SlabError, match="cannot be opened"):
        DiskSlab(tmp_path / "kv" / "f.slab", "f", 4, BYTES)
