"""The log level of a running service: looked at and changed over REST."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from lmcache_servicekit.audit import AUDIT_LOGGER
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.errors import NotFoundError, PermissionDeniedError
from lmcache_servicekit.logs import LogLevel, set_level

LoggerName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class LogLevelRequest(BaseModel):
    """Which level is wanted, and for what."""

    model_config = ConfigDict(extra="forbid")

    level: LogLevel
    logger: LoggerName | None = Field(
        None, description="A module or package; without it, the whole process"
    )


class LogLevels(BaseModel):
    """The levels in force."""

    level: str = Field(description="Of the whole process")
    loggers: dict[str, str] = Field(description="Of loggers that have one of their own")


def create_log_router() -> APIRouter:
    """Make the routes `GET` and `PUT /v1/log-level`. A change lasts until the process ends."""
    router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)

    @router.get("/log-level", summary="Show log levels")
    async def show_levels(principal: ClientPrincipal) -> LogLevels:
        return _levels()

    @router.put("/log-level", summary="Change log levels")
    async def change_level(request: LogLevelRequest, principal: AdminPrincipal) -> LogLevels:
        """Of the process or one logger; 404 for an unknown one."""
        if request.logger == AUDIT_LOGGER:
            raise PermissionDeniedError("the audit log is written at any level")
        if request.logger is not None and request.logger not in logging.root.manager.loggerDict:
            raise NotFoundError(
                f"no logger {request.logger!r}: name a module or package of the process, for"
                " example lmcache_core"
            )
        set_level(request.level, request.logger)
        return _levels()

    return router


def _levels() -> LogLevels:
    own = {
        name: logging.getLevelName(logger.level).lower()
        for name, logger in sorted(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return LogLevels(level=logging.getLevelName(logging.root.level).lower(), loggers=own)
