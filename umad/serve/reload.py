"""umad-serve reads its configuration again: at SIGHUP, and when the daemon has done so.

Owns ``Reloader``: which settings take effect, in which order the parts hear of them, and what is
said of it.  Rules: a text that cannot be used changes nothing; whoever starts the next engine uses
what is in effect; models that did not change notice nothing.
"""

import asyncio
import os
import time
from dataclasses import fields, replace
from typing import Final

import structlog

from umad.errors import ConfigError, UmadError
from umad.serve.app import Front
from umad.serve.link import EngineLink
from umad.serve.main import check_config, kept, read_config
from umad.settings import Settings

# Of [serve]; its other settings are used once, at the start.
_LIVE: Final = ("requests_max", "queue_max", "requests_per_client_max", "wait_max")
log = structlog.get_logger()


class Reloader:
    """Reads one file again and again.

    Args:
        path: the file.
        text: what it held at the start.
        settings: the same, checked.
        config_fd: holds what an engine starts with.
        front: serves by the settings.
        link: to the engine.
    """

    def __init__(
        self,
        path: str,
        text: str,
        settings: Settings,
        config_fd: int,
        front: Front,
        link: EngineLink,
    ) -> None:
        self._path = path
        self._text = text
        self._settings = settings
        self._config_fd = config_fd
        self._front = front
        self._link = link
        self._lock = asyncio.Lock()

    async def reload(self) -> None:
        """Take over what the file says now, or say why not."""
        async with self._lock:
            try:
                text = await asyncio.to_thread(read_config, self._path)
                new = await asyncio.to_thread(check_config, text, self._path)
            except ConfigError as error:
                self._front.configuration["problem"] = error.message
                log.error("serve.not_reloaded", reason=error.message)
                return
            self._front.configuration = {"read_unix_s": int(time.time()), "problem": ""}
            if text != self._text:
                await self._take_over(text, new)

    async def _take_over(self, text: str, new: Settings) -> None:
        old = self._settings
        live = {name: getattr(new.serve, name) for name in _LIVE}
        serve = replace(old.serve, **live)
        # The daemon's own tables are not ours: what counts here is where it listened at our start.
        self._settings = replace(old, serve=serve, models=new.models)
        self._text = text
        fresh = kept(text)
        os.dup2(fresh, self._config_fd, inheritable=False)
        os.close(fresh)
        self._front.follow(self._settings)
        waits = [
            f"serve.{one.name}"
            for one in fields(serve)
            if getattr(serve, one.name) != getattr(new.serve, one.name)
        ]
        log.info(
            "serve.reloaded",
            models=[model.name for model in new.models],
            restart_for=waits,
        )
        try:
            await self._link.reload(self._settings, text)
        except UmadError as error:  # it ended meanwhile; the next one starts with the new text
            log.info("serve.engine_not_told", reason=error.message)
