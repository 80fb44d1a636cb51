"""A byte stream from which lines can be read."""

from __future__ import annotations

from lmcache_core.errors import ProtocolError
from lmcache_core.wire.stream import STAGING_BYTES, FrameStream

LINE_END = b"\r\n"
MAX_LINE_BYTES = STAGING_BYTES


class LineStream(FrameStream):
    """A `FrameStream` that reads lines too."""

    async def read_line(self, max_bytes: int) -> bytes:
        """A line without its end. A cancelled read loses nothing.

        Args:
            max_bytes: Longest line, its end included; at most `MAX_LINE_BYTES`.

        Raises:
            ProtocolError: The line is longer.
            UnavailableError: The connection ended first.
        """
        while (
            end := self._buffer.find(LINE_END, self._start, min(self._end, self._start + max_bytes))
        ) < 0:
            if self.num_staged >= max_bytes:
                raise ProtocolError(f"a line of more than {max_bytes} bytes")
            await self.until_staged(self.num_staged + 1)
        line = bytes(self._buffer[self._start : end])
        self._consume(len(line) + len(LINE_END))
        return line
