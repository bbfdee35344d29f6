"""The control socket on its own: what it does with what no message holds."""

import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

from tests.daemon.running import Raw
from umad.daemon.control import Channel, ControlServer
from umad.wire.frames import Limits
from umad.wire.messages import Notification, Request

TOO_LONG = "x" * (Limits().message_bytes + 1)


class Talkative:
    """A handler whose answers, refusals and reports no message holds; ``ping`` is answered."""

    def opened(self, channel: Channel) -> None: ...

    def request(self, channel: Channel, message: Request) -> None:
        if message.method == "status":
            channel.notify("queued", {"reason": TOO_LONG})
            channel.respond(message.id, {"text": TOO_LONG})
        elif message.method == "events":
            channel.respond(message.id, error={"code": "overloaded", "message": TOO_LONG})
        else:
            channel.respond(message.id, {})

    def notification(self, channel: Channel, message: Notification) -> None: ...

    def closed(self, channel: Channel, why: str) -> None: ...

    def foreign(self, channel: Channel, pid: int) -> None: ...

    def idle_allowed(self, channel: Channel) -> bool:
        return True


async def answers(path: Path, *methods: str) -> list[Any]:
    """What a peer hears; whatever a callback of the loop raises ends this."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[list[Any]] = loop.create_future()

    def failed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        heard.set_exception(context["exception"])

    loop.set_exception_handler(failed)

    def ask() -> None:
        with Raw(path) as raw, contextlib.suppress(OSError):
            told = [raw.call(method) for method in methods]
            loop.call_soon_threadsafe(heard.set_result, told)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = ControlServer(
            loop,
            listener,
            Talkative(),
            connections_max=4,
            trusted_uids=frozenset(),
            refused=heard.set_exception,  # type: ignore[arg-type]  # nobody is turned away here
        )
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            return await heard
        finally:
            server.close()
            await asyncio.to_thread(asking.join)


def test_an_answer_that_no_message_holds_is_its_askers_error(folder: Path) -> None:
    told = asyncio.run(answers(folder / "umad.sock", "status", "events", "ping"))
    assert [one.get("code") for one in told] == ["overloaded", "overloaded", None]
    for one in told[:2]:
        assert "does not fit into a message" in one["message"]
