"""Put drafts in the places of their targets, all or none, unless the targets have changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from einmpi.files.atomic import (
    NotPublished,
    exchange_names,
    flush_folder,
    put_in_place,
    reason_of,
)
from einmpi.files.identity import FileIdentity, identity_at
from einmpi.files.journal import (
    Entry,
    Journal,
    flush_folders,
    remove_journal,
    roll_back,
    version_of,
    write_journal,
)


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
    return replace(now, changed_ns=draft.replaced.changed_ns) == draft.replaced


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
