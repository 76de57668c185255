"""The journal of files that are replaced together: a killed run leaves it, the next one finishes.

Once the journal has its name, the new files count.
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
    Lock,
    NotPublished,
    acquire_lock,
    draft_path,
    exchange_names,
    flush_folder,
    hidden_path,
    lock_path,
    put_in_place,
    reason_of,
    remove_path,
    taken_path,
)
from einmpi.files.datasets import FileIdentity, identity_at
from einmpi.process.environment import why_open_to_others

_FORMAT = "einmpi journal 2"
_MOST_BYTES = 2**24  # of a journal that is read
_WAIT_SECONDS = 5.0  # for a living run to finish its renames before one of its files is read
_LOOK_SECONDS = 0.02
UNFINISHED = "a killed run has replaced only some of its output files, and the rest fails"

Version: TypeAlias = tuple[int, int, int]  # as of a FileIdentity


@dataclass(frozen=True)
class Entry:
    """One file of a journal: its path, its old version, None if it is new, and its new inode."""

    target: str
    old: Version | None
    new_inode: int


@dataclass(frozen=True)
class Journal:
    """Files that belong together. `forward` is False if the run has decided to undo its renames.

    The journal lies beside the first file, and a copy beside each of the others. Only the first
    one counts: the copies tell where it is.
    """

    token: str
    forward: bool
    entries: tuple[Entry, ...]

    @property
    def first(self) -> str:
        return self.entries[0].target

    def draft(self, entry: Entry) -> str:
        return draft_path(entry.target, self.token)

    def backup(self, entry: Entry) -> str:
        """Return the path of a second name of the old file, by which it can come back."""
        return hidden_path(entry.target, f"{self.token}.old")

    def text(self, folder: str) -> str:
        """Return what is written into a folder. The whole may be renamed: paths begin there."""
        files = []
        for entry in self.entries:
            path = os.path.relpath(entry.target, folder)
            files.append([path, entry.old, entry.new_inode])
        content = {"format": _FORMAT, "token": self.token, "forward": self.forward, "files": files}
        return json.dumps(content)


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


def _finish(journal: Journal) -> None:
    if journal.forward:
        _roll_forward(journal)
    else:
        roll_back(journal)
    flush_folders(journal)
    remove_journal(journal)


def _roll_forward(journal: Journal) -> None:
    """Do the renames that are missing, but none onto a file that was changed since."""
    for entry in journal.entries:
        draft = journal.draft(entry)
        if not _is_own_file(draft, entry.new_inode):
            continue
        if version_of(entry.target) == entry.old:
            put_in_place(draft, entry.target, journal.backup(entry))
        elif _is_moved_away(journal, entry):
            os.rename(draft, entry.target)


def _is_moved_away(journal: Journal, entry: Entry) -> bool:
    """Return whether an old folder has its second name, and nothing is in its place yet."""
    if entry.old is None or os.path.lexists(entry.target):
        return False
    return _is_own_file(journal.backup(entry), entry.old[0])


def roll_back(journal: Journal) -> list[str]:
    """Put the old files back; return the paths where that was not possible."""
    remaining = []
    for entry in journal.entries:
        found = identity_at(entry.target)
        try:
            if _is_moved_away(journal, entry):
                os.rename(journal.backup(entry), entry.target)
            elif found is None or found.inode != entry.new_inode:
                continue
            elif entry.old is None:
                remove_path(entry.target)
            elif os.path.isdir(entry.target):
                _put_folder_back(journal, entry, entry.old[0])
            else:
                os.replace(journal.backup(entry), entry.target)
        except OSError:
            remaining.append(entry.target)
    return remaining


def _put_folder_back(journal: Journal, entry: Entry, old_inode: int) -> None:
    """Put an old folder back that has its second name, or the name of the draft."""
    old = journal.backup(entry)
    free = journal.draft(entry)
    if _is_own_file(free, old_inode):
        old, free = free, old
    if not exchange_names(old, entry.target):
        os.rename(entry.target, free)
        os.rename(old, entry.target)


# ---- the file -----------------------------------------------------------------------------------


def write_journal(journal: Journal, target: str) -> None:
    """Write the journal beside a file, whole or not at all."""
    draft = hidden_path(target, f"{journal.token}.journal")
    with contextlib.suppress(FileNotFoundError):
        os.remove(draft)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(journal.text(os.path.dirname(target)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, _journal_path(target))


def _committed_journal(target: str) -> Journal | None:
    """Return the journal that a file is part of, if it counts."""
    found = _read(target)
    if found is None or found.first == target:
        return found
    journal = _read(found.first)
    if journal is None or journal.token != found.token:
        return None
    return journal


def _read(target: str) -> Journal | None:
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
            place = os.path.normpath(os.path.join(os.path.dirname(target), path))
            entries.append(Entry(place, None if old is None else tuple(old), int(new_inode)))
        journal = Journal(str(content["token"]), bool(content["forward"]), tuple(entries))
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


def remove_journal(journal: Journal) -> None:
    """Remove what belongs to the journal. It counts until it goes, so it goes last but backups."""
    paths = [_journal_path(entry.target) for entry in reversed(journal.entries)]
    for entry in journal.entries:
        paths.append(journal.backup(entry))
        paths.append(journal.draft(entry))
        paths.append(hidden_path(entry.target, f"{journal.token}.journal"))
        paths.append(taken_path(entry.target, journal.token))
    for path in paths:
        with contextlib.suppress(OSError):
            remove_path(path)


def flush_folders(journal: Journal) -> None:
    for folder in {os.path.dirname(entry.target) for entry in journal.entries}:
        flush_folder(folder)


def _journal_path(target: str) -> str:
    return hidden_path(target, "journal")


def version_of(path: str) -> Version | None:
    found = identity_at(path)
    return None if found is None else found.version


def _is_own_file(path: str, inode: int) -> bool:
    """Return whether this file or folder, and not one that was put there since, is at a path."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid()
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and is_ours and status.st_ino == inode


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user, and nobody else can write to it."""
    is_ours = status.st_uid == os.geteuid()
    is_open_to_others = bool(why_open_to_others(status, sticky_is_safe=False))
    return stat.S_ISREG(status.st_mode) and is_ours and not is_open_to_others


# ---- publishing ----------------------------------------------------------------------------------
#
# Put drafts in the places of their targets, all or none, unless the targets have changed.


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


def publish_all(drafts: Sequence[Draft], token: str) -> None:
    """Put drafts in the places of their targets: all of them or none, else raise NotPublished.

    The names of the drafts have the run's token. The caller has the locks of all targets.
    """
    for draft in drafts:
        if not _is_unchanged(draft):
            reason = "another program has changed it while the results were being written"
            raise NotPublished(reason, draft.target)
    try:
        is_published = len(drafts) == 1 and _replace_at_once(drafts[0])
        if not is_published:
            journal, without_backup = _commit(drafts, token)
    except OSError as error:
        raise NotPublished(reason_of(error), drafts[0].target, _unchanged(drafts)) from error
    if is_published:
        _flush(drafts)
        return
    backups = {entry.target: journal.backup(entry) for entry in journal.entries}
    # A file without a backup cannot come back, so it is replaced while nothing else has been.
    in_order = sorted(drafts, key=lambda draft: draft.target not in without_backup)
    for draft in in_order:
        try:
            put_in_place(draft.path, draft.target, backups[draft.target])
        except OSError as error:
            state = _undo(journal, drafts)
            raise NotPublished(reason_of(error), draft.target, state) from error
    _flush(drafts)  # if this fails the journal stays: after a restart it makes the files alike
    remove_journal(journal)


def _replace_at_once(draft: Draft) -> bool:
    """Put a single draft in its place in one step; return False if that is not possible.

    That is so for a folder where there is one already, on file systems that cannot exchange the
    names of two. The old folder has the name of the draft afterwards.
    """
    if os.path.isdir(draft.path) and os.path.lexists(draft.target):
        return exchange_names(draft.path, draft.target)
    os.replace(draft.path, draft.target)
    return True


def _flush(drafts: Sequence[Draft]) -> None:
    """Make the renames survive a power cut; raise NotPublished if the disk fails."""
    for folder in {os.path.dirname(draft.target) for draft in drafts}:
        try:
            flush_folder(folder)
        except OSError as error:
            files = ", ".join(draft.file for draft in drafts)
            state = f"{files} may be old again after a restart"
            raise NotPublished(reason_of(error), state=state) from error


def _commit(drafts: Sequence[Draft], token: str) -> tuple[Journal, list[str]]:
    """Write the journal: from then on the new files count.

    Return it, and the targets of which the file system allows no backup.
    """
    entries = []
    for draft in drafts:
        entries.append(Entry(draft.target, version_of(draft.target), os.stat(draft.path).st_ino))
    journal = Journal(token, True, tuple(entries))
    without_backup = []
    try:
        for entry in entries:
            if entry.old is not None and not _make_backup(journal, entry):
                without_backup.append(entry.target)
        for entry in entries[1:]:
            write_journal(journal, entry.target)
        flush_folders(journal)  # the copies are on disk before the journal itself
        write_journal(journal, journal.first)
        flush_folder(os.path.dirname(journal.first))
    except OSError:
        remove_journal(journal)
        raise
    return journal, without_backup


def _make_backup(journal: Journal, entry: Entry) -> bool:
    """Give the old file a second name; return whether the file system allows that.

    A folder gets one when it is replaced.
    """
    if os.path.isdir(entry.target):
        return True
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
    return now._replace(changed_ns=draft.replaced.changed_ns) == draft.replaced


def _undo(journal: Journal, drafts: Sequence[Draft]) -> str:
    """Undo the renames after one has failed; return what is at the places of the files then."""
    undoing = replace(journal, forward=False)
    with contextlib.suppress(OSError):
        # If this run is killed now, the next one goes on with it.
        write_journal(undoing, journal.first)
    new_targets = roll_back(undoing)
    with contextlib.suppress(OSError):  # what has failed already is what the line is about
        flush_folders(journal)
    remove_journal(journal)
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
