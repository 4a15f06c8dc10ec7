"""A folder of checkpoints in a bucket in memory, whose requests fail and whose answers are lost."""

from __future__ import annotations

from tests.bucket.memory_objects import Bucket, Fate, Killed, Request, Stored, at
from tests.bucket.saving import new_job, new_store, remove_failed, set_aside_in
from tests.store.backend import UNSUPPORTED, Backend, Fault, Files, Seen, Written
from torchtitan_lite.bucket.bucket_store import KEPT_SECONDS, BucketStore
from torchtitan_lite.bucket.head import Status
from torchtitan_lite.bucket.naming import parse_attempt
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import ObjectPlace, Place

FATES = [fate for fate in Fate if fate is not Fate.CARRIED_OUT]
MOST_REQUESTS = 16
"""That an operation of a small folder takes."""


class BucketBackend(Backend):
    """The folder in `bucket`. Between two processes half a day passes."""

    store: BucketStore
    crash = Killed

    def __init__(self) -> None:
        self.bucket = Bucket()
        self.next_process()

    def crowd(self) -> None:
        """Put in what is not ours."""
        for name in UNSUPPORTED:
            self.bucket.put(f"{name}/{layout.METADATA}", b"theirs")

    def open(self) -> BucketStore:
        return new_store(self.bucket)[0]

    def seen(self) -> Seen:
        """Return what a reader finds, what is pinned, and what is set aside."""
        store = self.open()
        aside = sorted((entry.step, entry.status.value) for entry in set_aside_in(store))
        return Seen(self.read(), (store.pins.read(), aside))

    def next_process(self) -> None:
        self.bucket.now += KEPT_SECONDS / 2 + 1
        self.job = new_job(self.bucket)
        self.store = self.job.store

    def start(self) -> None:
        self.job.lease.take()
        self.store.recover()

    def arm(self, fault: Fault | None) -> None:
        number, fate = 0, Fate.CARRIED_OUT
        if fault is not None:
            number = len(self.job.objects.requests) + 1 + fault.at % MOST_REQUESTS
            fate = FATES[fault.kind % len(FATES)]
        self.job.objects.fate, self.job.objects.before = at(number, fate), lambda _: None

    def deliver(self) -> None:
        self.bucket.deliver()

    def refuse_changes(self) -> None:
        def refuse(request: Request) -> None:
            assert not request.is_write, "something was done after the folder was lost"

        self.job.objects.before = refuse

    def commit_late(self, written: Written) -> None:
        lost = self.store
        self.next_process()
        self.start()
        mine, self.store = self.store, lost
        try:
            self.commit(written)
        finally:
            self.store = mine

    def put(self, place: str, name: str, data: bytes) -> FileRecord:
        self.store.objects.put(f"{place}/{name}", data)
        return FileRecord.of(data)

    def remove_failed(self, step: int) -> None:
        if self.job.lease.claim is not None:
            remove_failed(self.job, self.bucket, step)

    def files(self, place: Place) -> Files:
        assert isinstance(place, ObjectPlace)
        prefix, state = f"{place.name}/", self.bucket.state()
        return {key.removeprefix(prefix): data for key, data in state.items() if key.startswith(prefix)}

    def change(self, place: Place, name: str, data: bytes | None) -> None:
        assert isinstance(place, ObjectPlace)
        if data is None:
            self.bucket.delete([f"{place.name}/{name}"])
        else:
            self.bucket.put(f"{place.name}/{name}", data)
        self.next_process()
        self.start()

    def foreign(self) -> object:
        return {key: data for key, data in self.bucket.state().items() if key.partition("/")[0] in UNSUPPORTED}

    def aside(self) -> dict[str, Files]:
        names = [entry.name for entry in set_aside_in(self.open())]
        return {name: self.files(ObjectPlace("", name)) for name in names}

    def leftovers(self) -> list[str]:
        """Return what is retired and still there, and what no head has and has not changed for a day."""
        entries, stored = self.open().head().entries, self.bucket.stored
        latest = {key.partition("/")[0]: each.modified for key, each in sorted(stored.items(), key=_modified)}
        old = {name for name, modified in latest.items() if modified < self.bucket.now - KEPT_SECONDS}
        strays = {name for name in old if parse_attempt(name)}.difference(entry.name for entry in entries)
        return [*strays, *(each.name for each in entries if each.status is Status.RETIRED and each.name in latest)]


def _modified(item: tuple[str, Stored]) -> float:
    return item[1].modified
