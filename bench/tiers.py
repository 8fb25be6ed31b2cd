"""python -m bench.tiers: how fast blocks move between the tiers, against this machine, and what an index entry costs.

demote, promote      blocks between the KV tensor and the host slab      against one large copy of the same bytes
write                blocks from the host slab into the slab file        against one sequential write of the same bytes
read                 and back, the kernel's cache emptied before         against one sequential read, likewise
cached_read          and back, out of the kernel's cache                 against the same
index                entries restored from Redis a second, bytes an entry in memory and in Redis
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from bench.store import running_store
from engine.batch import BlockFetch, BlockOffload
from engine.block_transfer import CpuBlockTransfer, host_tensor
from engine.prefix_index import BlockIdentity
from engine.protocol import pack_tokens
from engine.tiers.directory import TierDirectory
from engine.tiers.disk_slab import DiskSlab
from engine.tiers.host_slab import HostSlab
from engine.tiers.index_loader import load_index
from engine.tiers.index_record import RecordFormat, names_of
from engine.tiers.index_store import IndexStore, SlabLayout
from engine.tiers.io_thread import IoJob, IoKind, IoThread

BLOCK_SIZE = 16
BLOCK_SHAPE = (30, 2, BLOCK_SIZE, 3, 64)  # the default model, bf16
ROOT = bytes(16)


def timed(action: Callable[[], object], repeat: int = 5, *, before: Callable[[], object] = lambda: None) -> float:
    """Seconds, the median; `before` each time, unmeasured."""
    times: list[float] = []
    for _ in range(repeat):
        before()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory(blocks: int) -> dict[str, float]:
    kv_cache = torch.ones((blocks, *BLOCK_SHAPE), dtype=torch.bfloat16)
    host = HostSlab(blocks, kv_cache[0].nbytes)
    slots = host_tensor(host.buffer, kv_cache)
    slots.fill_(1)
    transfer = CpuBlockTransfer(kv_cache, slots, torch.get_num_threads())
    order = list(range(0, blocks, 2)) + list(range(1, blocks, 2))  # no two neighbours in a row
    offloads = [BlockOffload(block, slot) for slot, block in enumerate(order)]
    fetches = [BlockFetch(slot, block) for slot, block in enumerate(order)]
    size = kv_cache.nbytes
    plain = timed(lambda: slots.copy_(kv_cache))
    return {
        "copy_gb_s": size / plain / 1e9,
        "demote_fraction": plain / timed(lambda: transfer.offload(offloads)),
        "promote_fraction": plain / timed(lambda: transfer.fetch(fetches)),
    }


def disk(blocks: int, directory: Path) -> dict[str, float]:
    block_bytes = 2 * BLOCK_SIZE * 30 * 2 * 3 * 64
    host = HostSlab(blocks, block_bytes)
    host.buffer[:] = bytes(range(256)) * (len(host.buffer) // 256)
    slab = DiskSlab(directory / "b.slab", "bench", blocks, block_bytes)
    io = IoThread(slab)
    keys = [xxhash.xxh3_128_digest(b"%d" % n) for n in range(blocks)]
    sums: dict[int, int] = {}

    def forget(file: Path) -> None:
        """What follows comes from the device."""
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def run(kind: IoKind) -> None:
        for n in range(blocks):
            io.submit(IoJob(kind, n, keys[n], host.slot(n), n, sums.get(n, 0)))
        done = 0
        while done < blocks:
            io.wait(1.0)
            for one in io.completed():
                assert one.error is None
                sums[one.job.slot] = one.checksum or sums[one.job.slot]
                done += 1

    path = directory / "plain"
    path.touch()

    def write_plain() -> None:
        with open(path, "r+b", buffering=0) as file:  # over what is there, as a slab is written
            for start in range(0, len(host.buffer), 4 << 20):
                file.write(host.buffer[start : start + (4 << 20)])

    def read_plain() -> None:
        with open(path, "rb", buffering=0) as file:
            for start in range(0, len(host.buffer), 4 << 20):
                file.readinto(host.buffer[start : start + (4 << 20)])

    size = blocks * block_bytes
    write_plain()
    run(IoKind.WRITE)
    plain_write, own_write = timed(write_plain), timed(lambda: run(IoKind.WRITE))
    cached_plain, cached_own = timed(read_plain), timed(lambda: run(IoKind.READ))
    plain_read = timed(read_plain, before=lambda: forget(path))
    own_read = timed(lambda: run(IoKind.READ), before=lambda: forget(slab.path))
    io.stop()
    slab.close()
    return {
        "file_write_gb_s": size / plain_write / 1e9,
        "write_fraction": plain_write / own_write,
        "file_read_gb_s": size / plain_read / 1e9,
        "read_fraction": plain_read / own_read,
        "cached_read_gb_s": size / cached_plain / 1e9,
        "cached_read_fraction": cached_plain / cached_own,
    }


def full_directory(entries: int) -> TierDirectory:
    """Prompts of 64 blocks that share 16 with others."""
    directory = TierDirectory(entries, BLOCK_SIZE, ROOT)
    prompt = 0
    while directory.num_free:
        parent, above = ROOT, None
        for depth in range(64):
            tokens = pack_tokens([prompt // 8 if depth < 16 else prompt, depth, *range(BLOCK_SIZE - 2)])
            key = xxhash.xxh3_128_digest(parent + ROOT + tokens)
            if (slot := directory.find(key)) is None:
                documents = (f"document {prompt}",) if depth == 16 else ()
                slot = directory.add(BlockIdentity(key, ROOT, "tenant", tokens, documents), above)
                if slot is None:
                    break
                directory.ready(slot)
            parent, above = key, slot
        prompt += 1
    return directory


def index(entries: int, url: str) -> dict[str, float]:
    full = full_directory(entries)
    store = IndexStore(url, SlabLayout("bench", "bench", "bench", entries, BLOCK_SIZE), 3600)
    store.claim("one", wipe=True)
    record = RecordFormat(BLOCK_SIZE)
    slots = list(full.ready_slots())
    for first in range(0, len(slots), 2048):
        chunk = slots[first : first + 2048]
        names = {digest: packed for slot in chunk for digest, _, packed in names_of(full, slot)}
        store.publish("one", names, {slot: record.pack(full, slot) for slot in chunk})
    start = time.perf_counter()
    loaded = load_index(store, TierDirectory(entries, BLOCK_SIZE, ROOT), 0, lambda count: None)
    seconds = time.perf_counter() - start
    assert len(loaded.directory) == len(slots)
    figures = {
        "index_entries_per_s": len(slots) / seconds,
        "index_bytes_per_block": full.memory_bytes() / len(slots),
        "redis_bytes_per_block": store.memory_bytes() / len(slots),
    }
    store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, help="where the file lies; default: a temporary directory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="rg-tiers-", dir=args.directory) as name:
        directory = Path(name)
        figures = memory(args.blocks) | disk(args.blocks, directory)
        with running_store(directory) as store:
            figures |= index(args.entries, store.url)
    for key, value in figures.items():
        print(f"{key:<28}{value:>14,.2f}")
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    sys.exit(main())
