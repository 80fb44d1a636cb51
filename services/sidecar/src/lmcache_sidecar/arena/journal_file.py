"""The file of an arena's journal: written by the sidecar alone, appended to, replaced as a whole
when it has grown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lmcache_core.memory.shared import cannot_be_opened, is_none_of_ours

from lmcache_sidecar.arena.entries import AnyEntry, JournalError, framed, read_entries

logger = logging.getLogger(__name__)

FILE_NAME = "kv.journal"
MODE = 0o600
MIN_REWRITE_BYTES = 1 << 20
"""A shorter journal is not worth rewriting."""
REWRITE_RATIO = 2
"""It is rewritten when it is so many times as long as it would then be."""
MAX_JOURNAL_BYTES = 32 << 20
"""Beyond, it is given up. It and the one that replaces it fit beside the arena on a volume that
has 64 MiB more.
"""
_WRITE_ENTRIES = 512
_NO_FRAME = bytes(16)


class JournalFile:
    """A new file that entries are appended to. Not thread-safe.

    Args:
        path: Where; what was there is removed.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.num_bytes = 0
        self._num_entries = 0
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE
        )

    def write(self, bodies: Iterable[bytes]) -> None:
        """Append entries, in a few calls of the system at most.

        Raises:
            OSError: They cannot be written; what stands at the end may be half of one.
        """
        for data in self._pieces(bodies):
            at = 0
            while at < len(data):
                at += os.write(self._fd, memoryview(data)[at:])
            self.num_bytes += len(data)

    def spoil(self) -> None:
        """Make it unreadable, in place.

        Raises:
            OSError: Even that cannot be done.
        """
        os.pwrite(self._fd, _NO_FRAME, 0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _pieces(self, bodies: Iterable[bytes]) -> Iterator[bytes]:
        piece: list[bytes] = []
        for body in bodies:
            piece.append(framed(body, self._num_entries))
            self._num_entries += 1
            if len(piece) == _WRITE_ENTRIES:
                yield b"".join(piece)
                piece = []
        yield b"".join(piece)


class JournalFiles:
    """The journal of one arena on disk, and the draft that replaces it. Not thread-safe, but for
    `draft`.

    Args:
        directory: Where the arena is.

    Attributes:
        is_recording: Whether the file says what is so. If not, the next start must not find one.
        is_harmless: Whether the next start will believe nothing that is not so. While this is False
            nothing may be lent.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._draft_path = directory / f"{FILE_NAME}.new"
        self._file: JournalFile | None = None
        self._is_given_up = False
        self.is_recording = False
        self.is_harmless = True

    def read(self) -> Iterator[AnyEntry]:
        """What an earlier start has written.

        Raises:
            JournalError: There is none, or it is not to be trusted.
            CapacityError: It cannot be opened just now, which says nothing about it.
        """
        data = b""
        try:
            with os.fdopen(
                os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
            ) as file:
                status = os.fstat(file.fileno())
                if (
                    not stat.S_ISREG(status.st_mode)
                    or status.st_uid != os.geteuid()
                    or status.st_mode & 0o022
                ):
                    raise JournalError(f"{self.path} is not a file that this user alone may write")
                data = file.read(2 * MAX_JOURNAL_BYTES + 1)
        except OSError as exc:
            if is_none_of_ours(self.path, exc):
                raise JournalError(f"{self.path}: {exc.strerror}") from exc
            raise cannot_be_opened(self.path, exc) from exc
        if len(data) > 2 * MAX_JOURNAL_BYTES:
            raise JournalError(f"{self.path} is longer than any that is written")
        return read_entries(data)

    def draft(self, bodies: Iterable[bytes]) -> JournalFile:
        """Begin a journal that is to replace this one; in any thread.

        Raises:
            OSError: It cannot be written; nothing has changed.
        """
        draft = JournalFile(self._draft_path)
        try:
            draft.write(bodies)
        except OSError:
            self.drop(draft)
            raise
        return draft

    def adopt(self, draft: JournalFile, since: Sequence[bytes]) -> None:
        """Let a draft take the place of this journal.

        Args:
            draft: What was so when it was begun.
            since: What has been written since.

        Raises:
            OSError: It cannot be written or renamed; nothing has changed.
        """
        try:
            draft.write(since)
            draft.path.rename(self.path)
        except OSError:
            self.drop(draft)
            raise
        self.close()
        self._file = draft
        if self._is_given_up:
            logger.info(
                "the arena's journal is written again: what is in memory outlives this process"
            )
        self._is_given_up = False
        self.is_recording = self.is_harmless = True

    def drop(self, draft: JournalFile) -> None:
        """Forget a draft."""
        draft.close()
        with contextlib.suppress(OSError):
            draft.path.unlink()

    def append(self, bodies: Sequence[bytes]) -> None:
        """Write entries behind the others, in one call of the system. One that cannot be written
        ends the journal.
        """
        if self._file is None or not bodies:
            return
        try:
            self._file.write(bodies)
        except OSError as exc:
            self.give_up(exc.strerror or str(exc))
            return
        if self._file.num_bytes > MAX_JOURNAL_BYTES:
            self.give_up(f"it has more than {MAX_JOURNAL_BYTES} bytes")

    def is_long(self, weight_bytes: int) -> bool:
        """Whether it should be replaced by one of so many bytes."""
        return self._file is not None and self._file.num_bytes > max(
            MIN_REWRITE_BYTES, REWRITE_RATIO * weight_bytes
        )

    def give_up(self, why: str) -> None:
        """Make sure that the next start believes nothing: before all else, since memory is lent
        again right after this.
        """
        if not self._is_given_up:
            logger.error(
                "the arena's journal cannot be written (%s): what is in memory now will not outlive"
                " this process",
                why,
            )
        self._is_given_up = True
        self.is_recording = False
        was_harmless, self.is_harmless = self.is_harmless, self._is_spoilt()
        if self.is_harmless:
            self.close()
        elif was_harmless:
            logger.error(
                "nor can %s be removed: nothing is stored until it can, since the next start would"
                " believe it",
                self.path,
            )

    def discard(self) -> None:
        """Remove what an earlier start has left.

        Raises:
            OSError: It is there and cannot be removed.
        """
        self._draft_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write no more. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_spoilt(self) -> bool:
        try:
            self.path.unlink(missing_ok=True)
            return True
        except OSError:
            pass
        try:
            if self._file is None:
                self.path.write_bytes(_NO_FRAME)
            else:
                self._file.spoil()
        except OSError:
            return False
        return True
