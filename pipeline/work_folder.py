"""The folder in a target that a run keeps for itself, and what killed runs left half written there and beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pipeline.records import file_of, piece_of
from tasks import storage
from tasks.errors import ReshardError

WORK = ".reshard"
TEMPORARY, RECORDS, PLANS, PIECES = "temporary", "records", "plan.parquet", "pieces"


class WorkFolder:
    """One target's; knows the plan, so it can tell what is that plan's from what is another's."""

    def __init__(self, target: str, plan_id: str) -> None:
        self._target = target
        self._plan_id = plan_id

    def path(self, *names: str) -> str:
        return storage.join(self._target, WORK, *names)

    def make(self) -> None:
        for folder in self._folders():
            storage.make_directory(folder)

    def leftovers(self, *, finished: bool) -> list[Callable[[], None]]:
        """Find what killed attempts left half written; calling one removes it.

        `finished`: pieces of this plan's files are not needed any more.
        """
        places = [self.path(PIECES, name) for name in files_in(self.path(PIECES))]
        kept = [] if finished else [each for each in places if storage.basename(each).startswith(self._plan_id)]
        drops = [partial(storage.drop_pieces, place) for place in places if place not in kept]
        if finished:
            records = [name for name in files_in(self.path(RECORDS)) if piece_of(name)]
            drops += [partial(storage.delete, self.path(RECORDS, name)) for name in records]
        folders = (self._target, *self._folders())
        return [*drops, *(remove for folder in folders for remove in storage.leftovers(folder, places=kept))]

    def remove_leftovers(self, *, finished: bool) -> list[Exception]:
        """Remove them all, whichever fail; return the failures."""
        failures: list[Exception] = []
        for remove in self.leftovers(finished=finished):
            try:
                remove()
            except (ReshardError, OSError) as failure:
                failures.append(failure)
        return failures

    def forget_records(self, is_of: Callable[[str], bool]) -> None:
        """Delete the records of files, and of pieces of files, with certain names."""
        for name in files_in(self.path(RECORDS)):
            if is_of(file_of(name)):
                storage.delete(self.path(RECORDS, name))

    def _folders(self) -> list[str]:
        return [self.path(*names) for names in ((), (TEMPORARY,), (RECORDS,), (PLANS,), (PIECES,))]


def files_in(folder: str) -> list[str]:
    """Name the files of a folder; none where it is not there."""
    try:
        return sorted(file.name for file in storage.list_files(folder))
    except ReshardError as fault:
        if fault.problems[0].reference == "no-such-directory":
            return []
        raise
