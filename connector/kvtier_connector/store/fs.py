# SPDX-License-Identifier: Apache-2.0
"""The few system calls of the store behind one object, and the functions built directly on them.

Tests derive from `FileSystem` to fail or stop at any chosen call; nothing else in the store touches the disk. Files get
their names by a rename, so that readers see the old file or the new one, never half of one. A process that dies before
the rename leaves a partial file, which any process may remove when it is old.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import functools
import json
import mmap
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final, Self, TypeVar

from kvtier_connector.store.layout import ALIGNMENT, partial_path
from kvtier_connector.store.mounts import is_in_memory, mount_of

FILE_MODE = 0o640
"""The group is that of the pods of one tier: engines and the janitor may run as different users."""
SHARED_FILE_MODE = 0o660
"""For the one file that several users write to."""
DIRECTORY_MODE = 0o2770
"""The group removes files and adds its own; with the set-group-ID bit, what lies below has the same group."""

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""A volume is shared: a planted link must not be followed, and a planted pipe must not block the thread."""
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FIRST_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
"""For a file whose name only this process makes, so that a first write that failed can be repeated."""
NEXT_WRITE_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
FOLLOW_FLAGS = os.O_RDONLY | os.O_NONBLOCK
"""For files that Kubernetes mounts from ConfigMaps and Secrets, which are links."""

NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESPIPE, errno.ENODEV})
"""Errors of a link, a directory, a pipe, a socket or a device in the place of a file."""

_DIRECTORY_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
"""For a directory through which others are reached: a link to one is none."""

PROFILE_FILE = "volume.json"
"""Name of the measurements of a volume, in the directory of the tier."""

_NO_ATTRIBUTE = "user.kvtier"
"""No file has it."""

_MOST_PROFILE_BYTES = 4096
_DIRECTORY_PAUSES = (0.01, 0.05, 0.2, 1.0)
"""Seconds before something is made in a directory that is said to be there and not to be there."""
_RACED = frozenset({errno.ESTALE, errno.ENODATA})

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_T = TypeVar("_T")


class FileSystem:
    """One thin method for each system call, raising OSError as the system does. Any thread may call.

    A volume is shared, and another writer can put a link in the place of any directory, also between two calls.
    Below a directory that `rooted` was given, a link on the way raises NotADirectoryError, and nothing is opened,
    made, renamed or removed through it. Where that directory itself is reached through one, the error is ELOOP. To
    open a file takes no call more for that, and to name one takes two local ones.
    """

    _bases: MappingProxyType[str, str] = MappingProxyType({})
    """Directories below which links are refused, each with its real path."""
    _given: tuple[str, ...] = ()
    """Real paths of the directories that `rooted` was given."""
    _mounts: tuple[str, ...] = ()
    """Mount points above them. Without its mount, a path leads to another volume."""

    def rooted(self, directory: str) -> Self:
        """Return this file system, with links refused below the volume that holds an absolute path.

        That is the mount point above the path. On the root file system it is the directory above the path: that
        one may be reached through links, but may not be one.
        """
        # Never asks the volume, which may hang: constructors call this. The kernel's paths of mounts have no links.
        real = base = mount = mount_of(directory).point
        if not base:
            base = directory.rstrip("/").rpartition("/")[0]
            above, _, name = base.rpartition("/")
            real = f"{os.path.realpath(above or '/').rstrip('/')}/{name}"
        given = f"{real}{directory.rstrip('/')[len(base) :]}"
        if not base or given in self._given:
            return self
        # `LOCAL` is everyone's; another one belongs to its maker, who looks at what it counts.
        made = copy.copy(self) if type(self) is FileSystem else self
        made._bases = MappingProxyType({**self._bases, base: real})  # noqa: SLF001 - its own
        made._given, made._mounts = (*self._given, given), (*self._mounts, mount)  # noqa: SLF001 - its own
        return made

    def require_mount(self, path: str) -> None:
        """Raise OSError if the mount above a path that `rooted` found is gone; the volume is not asked."""
        above = max((each for each in self._mounts if f"{path}/".startswith(f"{each}/")), default="")
        # Both lead to the path, so the mount point that comes first in order is the one further up.
        if above and mount_of(path).point < above:
            raise OSError(errno.ENOTCONN, f"{above} is not mounted any more: mount the volume again", path)

    def open(self, path: str, flags: int) -> int:
        """Open a file; one that is created has mode 0640, whatever the process's umask takes away."""
        real = self._real(path)
        fd = os.open(path, flags, FILE_MODE) if real is None else self._open_plain(path, real, flags)
        if flags & os.O_CREAT:
            _mend_mode(fd, FILE_MODE)
        return fd

    def close(self, fd: int) -> None:
        """Close a file; network file systems report a failed write here."""
        os.close(fd)

    def share(self, fd: int) -> None:
        """Let the group write to an open file, as far as the volume lets us."""
        with contextlib.suppress(OSError):
            os.fchmod(fd, SHARED_FILE_MODE)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers and return how many bytes came."""
        return os.preadv(fd, buffers, offset)

    def map(self, fd: int) -> memoryview | None:  # noqa: ARG002 - for those that can
        """Return the file's bytes where they lie in memory, not to be written to; None where it is to be read."""
        return None

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers and return how many bytes went."""
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Wait until the file's bytes are on the device."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Describe an open file."""
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        """Describe a path without following a link."""
        with self._at(path) as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def look_again(self, path: str) -> None:
        """Have the node ask the server whether a name still means the file that it remembers.

        No cache of FUSE answers this call. If the server does not know the file any more, the node looks the name up.
        """
        with contextlib.suppress(OSError):
            os.getxattr(path, _NO_ATTRIBUTE, follow_symlinks=False)

    def touch(self, path: str) -> None:
        """Have the volume note that the file was written to now, by its own clock; of a link, the link."""
        with self._at(path) as (directory, name):
            os.utime(name, dir_fd=directory, follow_symlinks=False)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Describe the volume that holds a path."""
        return os.statvfs(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file over another, atomically."""
        if source.rpartition("/")[0] == target.rpartition("/")[0]:
            with self._at(source) as (directory, name):
                target = target if directory is None else target.rpartition("/")[2]
                os.rename(name, target, src_dir_fd=directory, dst_dir_fd=directory)
            return
        with self._at(source) as (directory, name), self._at(target) as (other, new_name):
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=other)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fail if it is taken."""
        with self._at(source) as (directory, name), self._at(target) as (other, new_name):
            os.link(name, new_name, src_dir_fd=directory, dst_dir_fd=other, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        with self._at(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def mkdir(self, path: str) -> None:
        """Make a directory with mode 2770, whatever the process's umask takes away; none in the place of a mount."""
        self.require_mount(path)
        with self._at(path) as (directory, name):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)
            with contextlib.suppress(OSError):
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                try:
                    _mend_mode(fd, DIRECTORY_MODE)
                finally:
                    os.close(fd)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        with self._at(path) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        """List a directory. Of its entries, ask for names and kinds alone: their paths may lead through links."""
        real = self._real(path)
        if real is None or real in self._bases.values():
            with os.scandir(path) as entries:
                return list(entries)
        fd = self._open_plain(path, real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with os.scandir(fd) as entries:
                found = list(entries)
                for entry in found:
                    # Where the volume does not tell, this asks, and the answer is kept.
                    entry.is_dir(follow_symlinks=False)
                return found
        finally:
            os.close(fd)

    def _real(self, path: str) -> str | None:
        """Return the real path of what lies at or below a base, None for any other path.

        Raises:
            ValueError: it leads up again.
        """
        for base, real in self._bases.items():
            if path.startswith(base) and path[len(base) : len(base) + 1] in {"", "/"}:
                below = path[len(base) :].rstrip("/")
                if "/." in below and {".", ".."} & set(below.split("/")):
                    raise ValueError(f"{path}: must not have . or .. below {base}")
                return f"{real}{below}"
        return None

    def _open_plain(self, path: str, real: str, flags: int) -> int:
        """Open a real path without links in it; errors name `path`.

        Raises:
            NotADirectoryError: a directory on the way is a link.
            OSError: with ELOOP, the file itself is one, or a directory that `rooted` was given.
        """
        try:
            return _open(real, flags)
        except OSError as error:
            error.filename = path
            if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
                raise
            # The shortest part of the path that is a link.
            ends = [place for place, letter in enumerate(real) if letter == "/" and place] + [len(real)]
            link = next((real[:end] for end in ends if os.path.islink(real[:end])), "")  # noqa: PTH114 - text in, text out
            if any(f"{given}/".startswith(f"{link}/") for given in self._given) and link:
                message = f"{link} is a link; nothing is done through a link: name what it names"
                raise OSError(errno.ELOOP, message, path) from error
            if error.errno == errno.ELOOP and link != real:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
            raise

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int | None, str]]:
        """Give the open directory of a path and the name in it, as the system's calls take them.

        Raises:
            NotADirectoryError: a link is in the way.
        """
        real = self._real(path)
        if real is None or real in self._bases.values():
            yield None, path
            return
        above, _, name = real.rpartition("/")
        directory = -1
        try:
            directory = self._open_plain(path, above, _DIRECTORY_FLAGS)
            yield directory, name
        except OSError as error:
            # The call was given a part of it.
            error.filename = path
            raise
        finally:
            if directory >= 0:
                os.close(directory)


class _OpenHow(ctypes.Structure):
    """As linux/openat2.h has it."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_OPENAT2: Final = 437
"""Number of the call, the same on every processor."""
_AT_FDCWD: Final = -100
_NO_LINKS: Final = 0x04 | 0x02
"""RESOLVE_NO_SYMLINKS and RESOLVE_NO_MAGICLINKS."""


def _open(real: str, flags: int) -> int:
    """Open a real path without links in it; with a link, the error is ELOOP or ENOTDIR."""
    call = _openat2()
    if call is None:
        return _open_step_by_step(real, flags)
    how = _OpenHow(flags | os.O_CLOEXEC, FILE_MODE if flags & os.O_CREAT else 0, _NO_LINKS)
    while (fd := call(_OPENAT2, _AT_FDCWD, os.fsencode(real), ctypes.byref(how), ctypes.sizeof(how))) < 0:
        number = ctypes.get_errno()
        if number not in {errno.EINTR, errno.EAGAIN}:
            raise OSError(number, os.strerror(number), real)
    return int(fd)


def _open_step_by_step(real: str, flags: int) -> int:
    """Open a real path from the root down, one directory at a time, for systems without openat2."""
    *above, name = real.split("/")[1:]
    held = os.open("/", _DIRECTORY_FLAGS)
    try:
        for each in above:
            below = os.open(each, _DIRECTORY_FLAGS, dir_fd=held)
            held, left = below, held
            os.close(left)
        return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=held)
    finally:
        os.close(held)


@functools.cache
def _openat2() -> Callable[..., int] | None:
    """Return the system's call; None where the kernel, or the sandbox, has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    how = _OpenHow(_DIRECTORY_FLAGS | os.O_CLOEXEC, 0, _NO_LINKS)
    fd = call(_OPENAT2, _AT_FDCWD, b"/", ctypes.byref(how), ctypes.sizeof(how))
    if fd < 0:
        return None
    os.close(fd)
    found: Callable[..., int] = call
    return found


def _mend_mode(fd: int, mode: int) -> None:
    # A new directory has the set-group-ID bit from the directory above, never from the call. The mode is compared
    # first: a change of mode asks every server of some file systems, and others refuse it.
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)


LOCAL = FileSystem()
"""The real one."""


def make_directories(fs: FileSystem, path: str) -> None:
    """Make a directory and those above it; one that is there already is fine."""
    with contextlib.suppress(FileExistsError):
        in_directory(fs, path, fs.mkdir)


def in_directory(fs: FileSystem, path: str, call: Callable[[str], _T]) -> _T:
    """Return what a call makes of a path; missing directories above it are made.

    Some clients report for a while that a directory of another client exists and that nothing can be made in it. Where
    many make one directory at once, those of GlusterFS may refuse each of them.
    """
    above = os.path.dirname(path)  # noqa: PTH120 - text in, text out
    for pause in (0.0, 0.0, *_DIRECTORY_PAUSES):
        time.sleep(pause)
        try:
            return call(path)
        except FileNotFoundError:
            make_directories(fs, above)
        except OSError as error:
            if error.errno not in _RACED:
                raise
            fs.look_again(above)
    return call(path)


def list_directory(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    """List a directory, nothing if there is none; raise OSError if it cannot be read.

    A file system that is `rooted` above it takes a link for none: it could lead to files of others.
    """
    try:
        return fs.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def new_token() -> str:
    """Return 32 hex digits that no other writer on any host has."""
    return uuid.uuid4().hex


def new_page() -> memoryview:
    """Return an aligned page for one header, private to this process even after a fork."""
    return memoryview(mmap.mmap(-1, ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def is_page_aligned(view: memoryview) -> bool:
    """Return whether O_DIRECT accepts the buffer; a read-only one hides its address and counts as unaligned."""
    if view.readonly or view.nbytes == 0 or view.nbytes % ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


class DirectIo:
    """Decides, transfer by transfer, whether the page cache is bypassed with O_DIRECT.

    The file system under a root is asked with a one-page file, by the first threads that write. While the root does not
    exist there is nothing to ask, and transfers go through the page cache.
    """

    def __init__(
        self, fs: FileSystem, root: str, *, direct: bool | None, advised: Callable[[], bool | None] = lambda: None
    ) -> None:
        """Store the settings; `direct` skips the question, `advised` says whether it was found to pay."""
        self._advised = advised
        self._fs = fs
        self._root = root
        self._answer = direct if O_DIRECT else False

    def flag(self, view: memoryview) -> int:
        """Return O_DIRECT or 0, to be added to the flags with which the file of this payload is opened."""
        return O_DIRECT if is_page_aligned(view) and self.is_supported() else 0

    def is_supported(self) -> bool:
        """Return whether files under the root take O_DIRECT."""
        if self._answer is None:
            self._answer = self._ask() and self._advised() is not False
        return bool(self._answer)

    def _ask(self) -> bool | None:
        path = partial_path(f"{self._root}/direct-io", new_token())
        page = new_page()
        fd = -1
        try:
            fd = self._fs.open(path, CREATE_FLAGS | O_DIRECT)
            if is_in_memory(self._fs.fstat(fd).st_dev):
                # It takes the flag and has nothing to bypass, while small pieces stay in the processor's cache.
                return False
            return self._fs.pwritev(fd, [page], 0) == ALIGNMENT
        except FileNotFoundError:
            return None
        except OSError:
            # Whatever the reason is, the page cache is right too; only speed is at stake.
            return False
        finally:
            abandon(self._fs, fd, path)


def abandon(fs: FileSystem, fd: int, path: str) -> None:
    """Close and remove a file that is not wanted after all, as far as the system lets us."""
    try:
        if fd >= 0:
            with contextlib.suppress(OSError):
                fs.close(fd)
    finally:
        with contextlib.suppress(OSError):
            fs.unlink(path)


@contextlib.contextmanager
def opened(fs: FileSystem, path: str, flags: int = READ_FLAGS) -> Iterator[int]:
    """Open a file for the caller, and close it, which may raise: network file systems report failed writes there.

    For a caller who only reads, an error of the close says nothing of the bytes.
    """
    fd = fs.open(path, flags)
    is_telling = False
    try:
        yield fd
        is_telling = bool(flags & (os.O_WRONLY | os.O_RDWR))
    finally:
        try:
            fs.close(fd)
        except OSError:
            if is_telling:
                raise


def read_into(fs: FileSystem, fd: int, buffer: memoryview, offset: int = 0) -> int:
    """Fill the buffer through the page cache; return the bytes read, fewer if the file ends."""
    done = 0
    while done < buffer.nbytes and (count := fs.preadv(fd, [buffer[done : done + _PIECE_BYTES]], offset + done)):
        done += count
    return done


def read_bytes(fs: FileSystem, fd: int, count: int, offset: int = 0) -> bytes:
    """Return so many bytes of an open file, fewer if it ends."""
    buffer = memoryview(bytearray(count))
    return bytes(buffer[: read_into(fs, fd, buffer, offset)])


def read_file(fs: FileSystem, path: str, *, most_bytes: int, flags: int = READ_FLAGS) -> bytes:
    """Return the content of a small file, cut at `most_bytes`; raise OSError where it cannot be read."""
    with opened(fs, path, flags) as fd:
        return read_bytes(fs, fd, most_bytes)


def measure_round_trip(fs: FileSystem, directory: str) -> float:
    """Return how soon the volume says that it has no file of a name that no cache knows; 0 where it says nothing."""
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        try:
            fs.stat(f"{directory}/.{new_token()}")
        except FileNotFoundError:
            seconds.append(time.monotonic() - began)
        except OSError:
            break
    return min(seconds, default=0.0)


def write_block(
    fs: FileSystem, fd: int, buffers: tuple[memoryview, memoryview], *, is_direct: bool, end_first: bool = False
) -> None:
    """Write a header page and a payload to the start of a new file, however many calls the system takes for it.

    With `end_first` the last page is written first, and once more in its turn: see `Mount.is_end_written_first`.
    """
    page, payload = buffers
    wanted = page.nbytes + payload.nbytes
    last = (wanted - 1) // ALIGNMENT * ALIGNMENT
    if end_first and last > page.nbytes:
        # How much of it the system takes does not matter.
        fs.pwritev(fd, [payload[last - page.nbytes :]], last)
    done = 0
    while done < wanted:
        rest = [page[done:], payload] if done < page.nbytes else [payload[done - page.nbytes :]]
        reached = done + fs.pwritev(fd, rest, done)
        # O_DIRECT continues at page boundaries only, so the last piece may be written twice.
        next_start = reached - reached % ALIGNMENT if is_direct and reached < wanted else reached
        if next_start <= done:
            # Nothing sensible is left but to ask again for ever; a full volume says so by itself.
            raise OSError(errno.EIO, f"the system took {reached - done} of {wanted - done} bytes")
        done = next_start


_PIECE_BYTES = 1 << 22
"""Moved by one system call at most, so that a slow volume holds a thread no longer than that takes."""


@contextlib.contextmanager
def replacing(
    fs: FileSystem, path: str, *, flags: int = CREATE_FLAGS, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """Give the descriptor of a new file, which takes the path when the caller is done; after a failure it is gone.

    Raises:
        OSError: the volume does not take it, or `is_wanted` says False at the end; what was at the path stays.
    """
    partial = partial_path(path, new_token())
    fd = -1
    is_left = True
    try:
        try:
            fd = fs.open(partial, flags)
        except FileNotFoundError:
            # Its directory is not there yet, so neither is the file: one call less for the first one of each.
            is_left = False
            raise
        yield fd
        closing, fd = fd, -1
        # Network file systems report a failed write here, so the file gets its name only afterwards.
        fs.close(closing)
        if not is_wanted():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), path)
        fs.rename(partial, path)
        is_left = False
    finally:
        if is_left:
            abandon(fs, fd, partial)


def write_all(fs: FileSystem, fd: int, data: memoryview, offset: int = 0) -> int:
    """Write all of it at the offset; return where it ends. The view must be of bytes."""
    done = 0
    while done < data.nbytes:
        done += fs.pwritev(fd, [data[done : done + _PIECE_BYTES]], offset + done)
    return offset + done


@dataclass(frozen=True, kw_only=True)
class VolumeProfile:
    """Measurements of the preflight; None and 0 where nothing was measured, or the choice made no difference.

    It is advice: a process that finds none, or cannot read it, measures the volume itself.
    """

    direct_io: bool | None = None
    """Whether to bypass the page cache."""
    read_bytes_per_second: int = 0
    """Rate at which one node reads a few files at a time."""
    write_bytes_per_second: int = 0
    """Rate at which one node writes a few files at a time."""


def write_profile(fs: FileSystem, tier_dir: str, profile: VolumeProfile) -> None:
    """Replace the file; raise OSError where the volume does not take it."""
    with replacing(fs, f"{tier_dir}/{PROFILE_FILE}") as fd:
        write_all(fs, fd, memoryview(json.dumps(asdict(profile), sort_keys=True).encode()))


def read_profile(fs: FileSystem, tier_dir: str) -> VolumeProfile:
    """Return the measurements in the file; an empty profile if there is no file, or its content cannot be used."""
    try:
        document = json.loads(read_file(fs, f"{tier_dir}/{PROFILE_FILE}", most_bytes=_MOST_PROFILE_BYTES))
        found = document.get("direct_io")
    except (OSError, ValueError, RecursionError, AttributeError):
        return VolumeProfile()
    return VolumeProfile(
        direct_io=found if isinstance(found, bool) else None,
        read_bytes_per_second=_rate(document.get("read_bytes_per_second")),
        write_bytes_per_second=_rate(document.get("write_bytes_per_second")),
    )


def _rate(found: object) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
