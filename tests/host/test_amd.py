import os

import pytest

from umad.host.amd import (
    KfdLimits,
    kfd_system_max,
    parse_hsa_memory,
    parse_hsa_pages,
    parse_kfd_limits,
    parse_page_pool,
)
from umad.units import GIB, MIB

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_kfd_limits():
    text = b"System mem used 86016M out of 124383M\nTTM mem used 83968M out of 114688M\n"
    assert parse_kfd_limits(text) == KfdLimits(86016 * MIB, 124383 * MIB, 83968 * MIB, 114688 * MIB)
    with pytest.raises(ValueError, match="TTM"):
        parse_kfd_limits(text[:30] + b"\n" + text[:38])


def test_the_limit_of_kfd_at_its_start():
    assert kfd_system_max(64 * GIB) == 63 * GIB - 1536 * MIB
    assert kfd_system_max(None) is None


def test_the_page_pool():
    text = b"wc\t:        0        3\n\ntotal\t:   105472 of 29360128\n"
    assert parse_page_pool(text) == 105472 * PAGE
    for bad in (b"", text[:-20], text.replace(b"105472", b"-1")):
        with pytest.raises(ValueError, match="total"):
            parse_page_pool(bad)


def test_the_layout_of_the_vendors_articles():
    assert parse_hsa_pages(b"Pages used: 262144\n") == GIB
    assert parse_hsa_memory(b"Total memory: 512 MB\nUsed memory: 300 MB\n") == 300 * MIB
    for parse in (parse_hsa_pages, parse_hsa_memory):
        with pytest.raises(ValueError, match="layout"):
            parse(b"Pages used: many\nUsed memory: -1 MB\n")
