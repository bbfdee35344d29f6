"""Bytes <-> MessagePack values, under limits.

Owns the only decoder and the only encoder of the protocol.  Rules: every cap is checked before
what it bounds can grow (a header that promises a billion elements costs nothing); the first
fault ends the decoder, because a byte stream has no place to start again.
Stays out: what the values mean (``messages``), reading and writing, and time: the caller asks
``has_partial`` and holds the deadline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgpack

from umad.errors import LocalProtocolError, RemoteProtocolError

_READ_BYTES: Final = 4096  # msgpack's first buffer; 256 idle connections must not cost 16 MiB
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one side accepts from the other.

    Attributes:
        message_bytes: size of one encoded message.
        depth: containers within each other, the message itself counted.
        elements: entries of one array or map; a whole message holds at most
            ``depth * elements`` values, which bounds what its bytes unfold to.
        open_requests: requests of one side that may wait for an answer.
    """

    message_bytes: int = 64 * 1024
    depth: int = 16
    elements: int = 1024
    open_requests: int = 256


class FrameDecoder:
    """Cuts a byte stream into MessagePack values.

    Args:
        limits: the caps; a value beyond one is a ``RemoteProtocolError``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        size = limits.message_bytes
        self._unpacker = msgpack.Unpacker(
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_map,
            ext_hook=_refuse_extension,
            read_size=min(size, _READ_BYTES),
            max_buffer_size=2 * size,  # an unfinished message and the next slice
            max_str_len=size,
            max_bin_len=size,
            max_array_len=limits.elements,
            max_map_len=limits.elements,
            max_ext_len=0,  # timestamps never reach ext_hook
        )
        self._fed = 0
        self._end = 0  # where the last whole message ended in the stream
        self._fault = ""

    @property
    def has_partial(self) -> bool:
        """A message has begun and is not complete; the caller's read deadline runs."""
        return self._fed > self._end

    def feed(self, data: bytes | memoryview) -> list[object]:
        """Take the next bytes of the stream, in pieces of any size.

        Returns:
            The values completed by these bytes, in order.

        Raises:
            RemoteProtocolError: the bytes break the protocol or a limit; so does every call
                after that one.
        """
        if self._fault:
            raise RemoteProtocolError(self._fault)
        found: list[object] = []
        slice_bytes = self._limits.message_bytes
        try:
            if len(data) <= slice_bytes:
                self._drain(data, found)
            else:
                # Many small messages at once must never count as one big one.
                view = memoryview(data)
                for start in range(0, len(view), slice_bytes):
                    self._drain(view[start : start + slice_bytes], found)
        except RemoteProtocolError as error:
            self._fault = error.message
            raise
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            # msgpack raises ValueError and its children for all it refuses; TypeError comes
            # from a map key that cannot be hashed.
            what = str(error) or type(error).__name__
            self._fault = f"the peer's bytes are no valid MessagePack within the limits: {what}"
            raise RemoteProtocolError(self._fault) from error
        return found

    def _drain(self, data: bytes | memoryview, found: list[object]) -> None:
        limits = self._limits
        unpacker = self._unpacker
        unpacker.feed(data)
        self._fed += len(data)
        for value in unpacker:
            end = unpacker.tell()
            if end - self._end > limits.message_bytes:
                _refuse_size(limits)
            self._end = end
            if type(value) in _SCALARS:
                raise RemoteProtocolError(
                    f"the peer sent a bare {type(value).__name__} where a message array belongs"
                )
            if _count(value, limits.depth) > limits.depth * limits.elements:
                raise RemoteProtocolError(
                    f"a message holds more than {limits.depth * limits.elements} values"
                )
            found.append(value)
        if self._fed - self._end > limits.message_bytes:
            _refuse_size(limits)


class FrameEncoder:
    """Turns values into bytes.  Not thread-safe: it reuses one buffer.

    Args:
        limits: the peer's caps.
    """

    def __init__(self, limits: Limits) -> None:
        self._size = limits.message_bytes
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=True)

    def encode(self, message: object) -> bytes:
        """The bytes of one message.

        Raises:
            LocalProtocolError: it holds what MessagePack cannot carry, or it is too big.
        """
        try:
            data: bytes = self._packer.pack(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise LocalProtocolError(f"this message cannot be encoded: {error}") from error
        if len(data) > self._size:
            raise LocalProtocolError(
                f"this message has {len(data)} bytes, more than the {self._size} of the protocol"
            )
        return data


def encode(message: object, limits: Limits | None = None) -> bytes:
    """The bytes of one message, for callers that send only now and then.

    Raises:
        LocalProtocolError: it holds what MessagePack cannot carry, or it is too big.
    """
    return FrameEncoder(limits or Limits()).encode(message)


def _refuse_size(limits: Limits) -> NoReturn:
    raise RemoteProtocolError(
        f"the peer's message is bigger than {limits.message_bytes} bytes, the protocol's limit"
    )


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = dict(pairs)
    if len(found) != len(pairs):
        raise RemoteProtocolError("the peer sent a map with a duplicate key")
    for key in found:
        if type(key) is not str:
            raise RemoteProtocolError("the peer sent a map key that is not text")
    return found


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise RemoteProtocolError(f"the peer sent extension type {code}; the protocol has none")


def _count(container: Any, depth_left: int) -> int:
    """How many values a decoded container holds, all levels together."""
    if depth_left == 0:
        raise RemoteProtocolError("the peer's message is nested deeper than the protocol allows")
    children: Iterable[Any] = container.values() if type(container) is dict else container
    total = len(container)
    if _SCALARS.issuperset(map(type, children)):  # at C speed: most containers are flat
        return total
    for child in children:
        if type(child) not in _SCALARS:
            total += _count(child, depth_left - 1)
    return total
