"""Several files are replaced all or none: a journal says which drafts belong together.

Once the journal has its name, the new files count: if the run is killed between two renames, the
next run that opens one of the files does the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from einmpi.errors import EinmpiError
from einmpi.files.atomic import (
    NotPublished,
    draft_path,
    flush_folder,
    hidden_path,
    publish,
    reason_of,
    taken_path,
)
from einmpi.files.identity import FileIdentity, identity_at
from einmpi.files.locks import Lock, acquire_lock, lock_path

_FORMAT = "einmpi journal 1"
_MOST_BYTES = 2**24  # of a journal that is read
_WAIT_SECONDS = 5.0  # for a living run to finish its renames before one of its files is read
_LOOK_SECONDS = 0.02
UNFINISHED = "a killed run has replaced only some of its output files, and the rest fails"

# The inode, size and time of modification of a file. Devices get other numbers at the next boot.
State: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Draft:
    """A complete draft, and the file whose place it takes.

    `file` is the user's path, `target` the same without links. `replaced` is the identity of the
    target when the draft was begun, None if there was no such file.
    """

    file: str
    target: str
    path: str
    replaced: FileIdentity | None


@dataclass(frozen=True)
class _Entry:
    """One file of a journal: its path, its state before, None if it is new, and its new inode."""

    target: str
    old: State | None
    new_inode: int


@dataclass(frozen=True)
class _Journal:
    """Files that belong together. `forward` is False if the run has decided to undo its renames.

    The journal lies beside the first file, and a copy beside each of the others. Only the first
    one counts: the copies tell where it is.
    """

    token: str
    forward: bool
    entries: tuple[_Entry, ...]

    @property
    def first(self) -> str:
        return self.entries[0].target

    def draft(self, entry: _Entry) -> str:
        return draft_path(entry.target, self.token)

    def backup(self, entry: _Entry) -> str:
        """Return the path of a second name of the old file, by which it can come back."""
        return hidden_path(entry.target, f"{self.token}.old")

    def text(self) -> str:
        files = [[entry.target, entry.old, entry.new_inode] for entry in self.entries]
        content = {"format": _FORMAT, "token": self.token, "forward": self.forward, "files": files}
        return json.dumps(content)


# ---- publishing ---------------------------------------------------------------------------------


def publish_all(drafts: Sequence[Draft], token: str) -> None:
    """Put drafts in the places of their targets: all of them or none, else raise NotPublished.

    The names of the drafts have the run's token. The caller has the locks of all targets.
    """
    for draft in drafts:
        if not _is_unchanged(draft):
            reason = "another program has changed it while the results were being written"
            raise NotPublished(reason, draft.target)
    if len(drafts) == 1:
        try:
            publish(drafts[0].path, drafts[0].target)
        except OSError as error:
            raise NotPublished(reason_of(error), drafts[0].target, _unchanged(drafts)) from error
        return
    try:
        journal, without_backup = _commit(drafts, token)
    except OSError as error:
        raise NotPublished(reason_of(error), drafts[0].target, _unchanged(drafts)) from error
    # A file without a backup cannot come back, so it is replaced while nothing else has been.
    in_order = sorted(drafts, key=lambda draft: draft.target not in without_backup)
    for draft in in_order:
        try:
            os.replace(draft.path, draft.target)
        except OSError as error:
            state = _undo(journal, drafts)
            raise NotPublished(reason_of(error), draft.target, state) from error
    _flush_folders(journal)
    _remove_journal(journal)


def _commit(drafts: Sequence[Draft], token: str) -> tuple[_Journal, list[str]]:
    """Write the journal: from then on the new files count.

    Return it, and the targets of which the file system allows no backup.
    """
    entries = []
    for draft in drafts:
        entries.append(_Entry(draft.target, _state(draft.target), os.stat(draft.path).st_ino))
    journal = _Journal(token, True, tuple(entries))
    without_backup = []
    try:
        for entry in entries:
            if entry.old is not None and not _make_backup(journal, entry):
                without_backup.append(entry.target)
        for entry in entries[1:]:
            _write(journal, entry.target)
        _flush_folders(journal)  # the copies are on disk before the journal itself
        _write(journal, journal.first)
    except OSError:
        _remove_journal(journal)
        raise
    flush_folder(os.path.dirname(journal.first))
    return journal, without_backup


def _make_backup(journal: _Journal, entry: _Entry) -> bool:
    """Give the old file a second name; return whether the file system allows that."""
    try:
        os.link(entry.target, journal.backup(entry), follow_symlinks=False)
    except OSError:
        return False
    return True


def _is_unchanged(draft: Draft) -> bool:
    """Return whether the target is what it was, apart from its permissions and further names."""
    now = identity_at(draft.target)
    if now is None or draft.replaced is None:
        return now is draft.replaced
    return replace(now, changed_ns=draft.replaced.changed_ns) == draft.replaced


def _undo(journal: _Journal, drafts: Sequence[Draft]) -> str:
    """Undo the renames after one has failed; return what is at the places of the files then."""
    undoing = replace(journal, forward=False)
    with contextlib.suppress(OSError):
        _write(undoing, journal.first)  # if this run is killed now, the next one goes on with it
    new_targets = _roll_back(undoing)
    _flush_folders(journal)
    _remove_journal(journal)
    if not new_targets:
        return _unchanged(drafts)
    new_files = ", ".join(draft.file for draft in drafts if draft.target in new_targets)
    old_files = ", ".join(draft.file for draft in drafts if draft.target not in new_targets)
    return f"{new_files} could not be put back and is new; {old_files} is as it was"


def _unchanged(drafts: Sequence[Draft]) -> str:
    if all(draft.replaced is None for draft in drafts):
        return "nothing was written"
    if len(drafts) == 1:
        return f"{drafts[0].file} is unchanged"
    return f"all {len(drafts)} output files are unchanged"


# ---- the next run -------------------------------------------------------------------------------


def finish_interrupted(target: str, locks: Sequence[Lock]) -> None:
    """Finish what a killed run has begun with this file, of which the caller has the lock.

    Raise BlockingIOError if another run is at work on a file that belongs together with it, and
    OSError if a file cannot be written.
    """
    journal = _committed_journal(target)
    if journal is None:
        if _read(target) is not None:  # the copy of a journal that never counted
            os.remove(_journal_path(target))
        return
    held = {lock.path for lock in locks}
    further: list[Lock] = []
    try:
        for entry in journal.entries:
            if lock_path(entry.target) not in held:
                further.append(acquire_lock(entry.target))
        _finish(journal)
    finally:
        for lock in further:
            lock.remove()


def finish_before_reading(file: str) -> None:
    """Finish what a killed run has begun with this file and others. Wait if the run is alive.

    Without locks nobody can tell that; then only a run that writes the files finishes it.
    """
    target = os.path.realpath(file)
    if not os.path.lexists(_journal_path(target)):
        return
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        journal = _committed_journal(target)
        if journal is None:
            return
        locks: list[Lock] = []
        try:
            for entry in journal.entries:
                locks.append(acquire_lock(entry.target))
            is_alone = all(lock.supported for lock in locks)
            if is_alone and _committed_journal(target) == journal:
                _finish(journal)
            return
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)
        except OSError as error:
            raise EinmpiError(f"{file}: {UNFINISHED}: {reason_of(error)}") from error
        finally:
            for lock in locks:
                lock.remove()


def _finish(journal: _Journal) -> None:
    if journal.forward:
        _roll_forward(journal)
    else:
        _roll_back(journal)
    _flush_folders(journal)
    _remove_journal(journal)


def _roll_forward(journal: _Journal) -> None:
    """Do the renames that are missing, but none onto a file that was changed since."""
    for entry in journal.entries:
        draft = journal.draft(entry)
        if _is_own_file(draft, entry.new_inode) and _state(entry.target) == entry.old:
            os.replace(draft, entry.target)


def _roll_back(journal: _Journal) -> list[str]:
    """Put the old files back; return the paths where that was not possible."""
    remaining = []
    for entry in journal.entries:
        state = _state(entry.target)
        if state is None or state[0] != entry.new_inode:
            continue
        try:
            if entry.old is None:
                os.remove(entry.target)
            else:
                os.replace(journal.backup(entry), entry.target)
        except OSError:
            remaining.append(entry.target)
    return remaining


# ---- the file -----------------------------------------------------------------------------------


def _write(journal: _Journal, target: str) -> None:
    """Write the journal beside a file, whole or not at all."""
    draft = hidden_path(target, f"{journal.token}.journal")
    with contextlib.suppress(FileNotFoundError):
        os.remove(draft)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(journal.text())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, _journal_path(target))


def _committed_journal(target: str) -> _Journal | None:
    """Return the journal that a file is part of, if it counts."""
    found = _read(target)
    if found is None or found.first == target:
        return found
    journal = _read(found.first)
    if journal is None or journal.token != found.token:
        return None
    return journal


def _read(target: str) -> _Journal | None:
    """Return the journal beside a file; None if there is none that this user has written.

    Others may put a file there if they can write to the folder: it is not used.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(_journal_path(target), flags)
        with open(descriptor, "rb") as file:
            if not _is_private(os.fstat(descriptor)):
                return None
            content = json.loads(file.read(_MOST_BYTES))
        if content["format"] != _FORMAT:
            return None
        entries = []
        for path, old, new_inode in content["files"]:
            entries.append(_Entry(str(path), None if old is None else tuple(old), int(new_inode)))
        journal = _Journal(str(content["token"]), bool(content["forward"]), tuple(entries))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    targets = [entry.target for entry in entries]
    # The drafts lie beside the files that they replace, under names made of the token.
    is_plain = len(journal.token) == 16 and journal.token.isalnum()
    if not is_plain or target not in targets:
        return None
    if any(os.path.realpath(path) != path for path in targets):
        return None
    return journal


def _remove_journal(journal: _Journal) -> None:
    """Remove what belongs to the journal. It counts until it goes, so it goes last but backups."""
    paths = []
    for entry in reversed(journal.entries):
        paths.append(_journal_path(entry.target))
    for entry in journal.entries:
        paths.append(journal.backup(entry))
        paths.append(journal.draft(entry))
        paths.append(hidden_path(entry.target, f"{journal.token}.journal"))
        paths.append(taken_path(entry.target, journal.token))
    for path in paths:
        with contextlib.suppress(OSError):
            os.remove(path)


def _flush_folders(journal: _Journal) -> None:
    for folder in {os.path.dirname(entry.target) for entry in journal.entries}:
        flush_folder(folder)


def _journal_path(target: str) -> str:
    return hidden_path(target, "journal")


def _state(path: str) -> State | None:
    found = identity_at(path)
    if found is None:
        return None
    return found.inode, found.size, found.modified_ns


def _is_own_file(path: str, inode: int) -> bool:
    """Return whether this file, and not one that somebody has put there since, is at a path."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid()
    return stat.S_ISREG(status.st_mode) and is_ours and status.st_ino == inode


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user, and nobody else can write to it."""
    is_ours = status.st_uid == os.geteuid()
    return stat.S_ISREG(status.st_mode) and is_ours and not status.st_mode & 0o022
