"""Something happens to the sidecar at an exact point of what this process says to it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from tests.fixtures.late_socket import name_of

BEFORE, AFTER = "before", "after"


class Sabotage:
    """`with Sabotage(patch, "LOAD", BEFORE, sidecar.kill) as sabotage:` and the first LOAD of this
    process finds the sidecar dead.

    Args:
        patch: Undone when the test ends, at the latest.
        message: Name of the frame, as `name_of` has it.
        when: Before it is sent, or after it was answered.
        action: What happens, once.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, message: str, when: str, action: Callable[[], None]
    ) -> None:
        self._patch = patch
        self._message = message
        self._when = when
        self._action = action
        self.has_happened = False

    def __enter__(self) -> Sabotage:
        from lmcache_core.sidecar import SidecarConnection

        # A relay would see frames, not the moment between a question and what follows from it.
        send, accept = SidecarConnection._send, SidecarConnection._accept
        names: dict[Any, str] = {}

        def sent(connection: SidecarConnection, request: Any, *args: Any) -> Any:
            if self._when == BEFORE:
                self._happen(name_of(request))
            question = send(connection, request, *args)
            names[question] = name_of(request)
            return question

        def accepted(connection: SidecarConnection, question: Any, *answer: Any) -> None:
            accept(connection, question, *answer)
            if self._when == AFTER:
                self._happen(names.pop(question, ""))

        self._patch.setattr(SidecarConnection, "_send", sent)
        self._patch.setattr(SidecarConnection, "_accept", accepted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.undo()

    def _happen(self, message: str) -> None:
        if message == self._message and not self.has_happened:
            self.has_happened = True
            self._action()
