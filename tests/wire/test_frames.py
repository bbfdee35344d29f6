"""The decoder against what a hostile or broken peer may send."""

import datetime
import tracemalloc

import msgpack
import pytest

from umad.errors import LocalProtocolError, RemoteProtocolError
from umad.wire.frames import FrameDecoder, FrameEncoder, Limits, encode

LIMITS = Limits()


@pytest.fixture
def decoder():
    return FrameDecoder(LIMITS)


def array(*items):
    return bytes([0x90 + len(items)]) + b"".join(items)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x00", "bare int"),
        (b"\x00" * 1000, "bare int"),
        (b"\xc0", "bare NoneType"),
        (b"\xc1", "FormatError"),
        (bytes.fromhex("DD3B9ACA00"), "max_array_len"),
        (bytes.fromhex("DF3B9ACA00"), "max_map_len"),
        (b"\x91" * 100_000 + b"\x90", "StackError"),
        (b"\x91" * 16 + b"\x90", "nested deeper"),
        (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536, "max_array_len"),
        (array(b"\xc7\x00\x7f"), "extension type 127"),
        (array(b"\xd4\x7f\x00"), "max_ext_len"),
        (array(b"\xc9\xff\xff\xff\xff\x7f"), "max_ext_len"),
        (b"\x82\xa5quota\x01\xa5quota\x02", "duplicate key"),
        (b"\x81\xc4\x01a\x01", "not text"),
        (b"\x81\x01\x01", "strict_map_key"),
        (b"\x81\x91\x01\x01", "valid MessagePack"),
        (array(b"\xa1\xff"), "utf-8"),
        (array(msgpack.packb(datetime.datetime.now(datetime.UTC), datetime=True)), "max_ext_len"),
        (array(msgpack.packb(msgpack.Timestamp(1, 0))), "max_ext_len"),
    ],
)
def test_each_fault_ends_the_decoder(decoder, data, why):
    with pytest.raises(RemoteProtocolError, match=why):
        decoder.feed(data)
    with pytest.raises(RemoteProtocolError, match=why):
        decoder.feed(b"\x90")


@pytest.mark.slow
def test_a_message_of_maps_cannot_unfold_without_bound():
    decoder = FrameDecoder(LIMITS)
    row = b"\xdc\x03\xe8" + b"\x80" * 1000
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="16384 values"):
        decoder.feed(b"\xdc\x00\x40" + row * 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_half_a_message_is_kept_and_told(decoder):
    data = encode([0, 1, "ping", [{}]])
    assert not decoder.has_partial
    assert decoder.feed(data[:4]) == []
    assert decoder.has_partial
    assert decoder.feed(memoryview(data[4:])) == [[0, 1, "ping", [{}]]]
    assert not decoder.has_partial
    assert decoder.feed(b"") == []


def test_half_a_message_above_the_cap_is_refused_before_its_end():
    decoder = FrameDecoder(Limits(message_bytes=100))
    header = b"\x94"
    decoder.feed(header)
    item = b"\xd9\x30" + b"x" * 48
    decoder.feed(item)
    with pytest.raises(RemoteProtocolError, match="bigger than 100 bytes"):
        decoder.feed(item)


@pytest.mark.parametrize("header", ["DB3B9ACA00", "C63B9ACA00"])
def test_a_forged_length_costs_no_memory_and_no_more_than_the_cap_is_read(decoder, header):
    tracemalloc.start()
    decoder.feed(bytes.fromhex(header))
    decoder.feed(b"x" * 60_000)
    with pytest.raises(RemoteProtocolError, match="bigger than"):
        decoder.feed(b"x" * 60_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_whole_message_above_the_cap_is_refused():
    decoder = FrameDecoder(Limits(message_bytes=100))
    message = array(*[b"\xd9\x30" + b"x" * 48] * 2)
    assert len(message) == 101
    for byte in message[:-1]:
        assert decoder.feed(bytes([byte])) == []
    with pytest.raises(RemoteProtocolError, match="bigger than 100 bytes"):
        decoder.feed(message[-1:])


def test_a_message_that_ends_in_the_next_slice_is_measured_whole():
    decoder = FrameDecoder(Limits(message_bytes=100))
    message = array(*[b"\xd9\x2e" + b"x" * 46] * 2, *[b"\x01"] * 10)
    with pytest.raises(RemoteProtocolError, match="bigger than 100 bytes"):
        decoder.feed(b"\x90" * 60 + message)


def test_many_small_messages_at_once_are_not_one_big_one(decoder):
    one = encode([2, "progress", [{"worker": 1, "stage": "reading", "ratio": 0.5}]])
    count = 10 * LIMITS.message_bytes // len(one)
    assert len(decoder.feed(one * count)) == count


def test_a_message_of_the_greatest_size_passes(decoder):
    text = "x" * (LIMITS.message_bytes - 4)
    data = encode([text])
    assert len(data) == LIMITS.message_bytes
    assert decoder.feed(data[:1000]) == []
    assert decoder.feed(data[1000:] + data) == [[text], [text]]


def test_a_private_link_may_raise_the_caps():
    limits = Limits(message_bytes=64 << 20, elements=100_000)
    data = encode([b"x" * (8 << 20), list(range(50_000))], limits)
    (message,) = FrameDecoder(limits).feed(data)
    assert len(message[0]) == 8 << 20


@pytest.mark.parametrize(
    "message", [[{1, 2}], [2**64], [b"x" * LIMITS.message_bytes], [object()], ["\ud800"]]
)
def test_what_cannot_be_sent_is_our_fault_and_harms_nothing(message):
    encoder = FrameEncoder(LIMITS)
    with pytest.raises(LocalProtocolError):
        encoder.encode(message)
    assert encoder.encode([1]) == b"\x91\x01"


def test_nesting_without_end_is_our_fault():
    ring = []
    ring.append(ring)
    with pytest.raises(LocalProtocolError):
        encode(ring)


def test_numbers_that_are_none_pass_here(decoder):
    ((value,),) = decoder.feed(encode([float("nan")]))
    assert value != value
