"""Small file systems for the fault sweep, which can be full or turn read-only in earnest.

They are mounted where only this process and its children see them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_RDONLY = 0x1
_MS_REMOUNT = 0x20
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 0x2
_libc = ctypes.CDLL(None, use_errno=True)

VOLUME_BYTES = 3 * 2**20
VOLUME_FILES = 400
IMAGE_BYTES = 8 * 2**20
FILLER = "filler"  # beside the folder of a case
CASE = "case"


# ---- system calls -------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def unmount(target: str) -> None:
    """Remove all mounts at a path."""
    while _libc.umount2(target.encode(), _MNT_DETACH) == 0:
        pass


def make_private_mounts() -> str:
    """Let this process mount what others do not see; return why that is not possible, or ""."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return f"mounts are not allowed: {os.strerror(ctypes.get_errno())}"
    try:
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    except OSError as error:
        return f"mounts are not allowed: {error}"
    return ""


def mount_memory(folder: str, options: str = "") -> None:
    """Put an empty file system in memory in the place of a folder."""
    _mount("none", folder, "tmpfs", 0, options)


def mount_read_only(folder: str) -> None:
    """Put a read-only view of a folder in its place, for everyone who looks it up from now on."""
    _mount(folder, folder, "", _MS_BIND)
    _mount("none", folder, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


# ---- volumes ------------------------------------------------------------------------------------


class PlainVolume:
    """A folder of an ordinary file system, where mounts are not allowed."""

    def __init__(self, parent: Path) -> None:
        self.root = parent / "volume"
        self.root.mkdir()
        self.case = self.root / CASE
        self.error_trigger = ""  # a file of the kernel: what is written there is a disk's error

    def fill_case(self, template: Path) -> None:
        """Make the case a copy of a folder."""
        self.restore()
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(template, self.case)

    def restore(self) -> None:
        """Remove the fault: the disk has space again and can be written to."""

    def close(self) -> None:
        """Remove the volume."""


class MemoryVolume(PlainVolume):
    """A small file system in memory, with room for few bytes and few files."""

    def __init__(self, parent: Path) -> None:
        super().__init__(parent)
        options = f"size={VOLUME_BYTES},nr_inodes={VOLUME_FILES}"
        mount_memory(str(self.root), options)

    def restore(self) -> None:
        unmount(str(self.case))
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.root / FILLER)
        shutil.rmtree(self.root / f"{FILLER}-files", ignore_errors=True)

    def close(self) -> None:
        self.restore()
        unmount(str(self.root))


class DiskVolume(PlainVolume):
    """An ext4 file system in a file. An error of its disk turns it read-only, as a real one."""

    def __init__(self, parent: Path) -> None:
        super().__init__(parent)
        self._pristine = parent / "pristine.img"
        self._image = parent / "disk.img"
        self._template: Path | None = None
        with open(self._pristine, "wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mke2fs", "-q", "-F", "-t", "ext4", "-b", "1024", str(self._pristine))
        shutil.copyfile(self._pristine, self._image)
        self._enter()  # fails where that is not allowed
        self._leave()

    def fill_case(self, template: Path) -> None:
        self._leave()
        if self._template != template:
            # Copied once: the image then has it on its disk, and not only in memory.
            shutil.copyfile(self._pristine, self._image)
            self._enter()
            shutil.copytree(template, self.case)
            self._leave()
            shutil.copyfile(self._image, f"{self._image}.filled")
            self._template = template
        shutil.copyfile(f"{self._image}.filled", self._image)
        self._enter()

    def _enter(self) -> None:
        options = "loop,errors=remount-ro"
        _run("mount", "-o", options, str(self._image), str(self.root))
        device = os.stat(self.root).st_dev
        name = os.path.basename(
            os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        )
        self.error_trigger = f"/sys/fs/ext4/{name}/trigger_fs_error"
        os.stat(self.error_trigger)

    def _leave(self) -> None:
        if os.path.ismount(self.root):
            _run("umount", str(self.root))

    def restore(self) -> None:
        # What was not on the disk when the error happened is lost, as after a crash.
        self._leave()
        self._enter()

    def close(self) -> None:
        self._leave()


def _run(*words: str) -> None:
    # The programs are not in the path of every user.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


# ---- faults -------------------------------------------------------------------------------------


def fill_bytes(root: str) -> None:
    """Use up the space of a volume."""
    descriptor = os.open(os.path.join(root, FILLER), os.O_WRONLY | os.O_CREAT)
    size = 2**16
    while size:
        try:
            os.write(descriptor, bytes(size))
        except OSError:
            size //= 2
    os.close(descriptor)


def fill_files(root: str) -> None:
    """Use up the number of files of a volume."""
    folder = os.path.join(root, f"{FILLER}-files")
    with contextlib.suppress(OSError):
        os.mkdir(folder)
        for number in range(10 * VOLUME_FILES):
            os.close(os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT))


def break_disk(error_trigger: str) -> None:
    """Make the disk of a volume fail, after which the system no longer writes to it."""
    with open(error_trigger, "w") as file:
        file.write("fault")
