import pytest

from umad.host.files import Unreadable
from umad.host.nvmap import Nvmap, NvmapClients, parse_clients

KIB = 1024
HEAD = "CLIENT                        PROCESS      PID        SIZE\n"
PSS_HEAD = "CLIENT                        PROCESS      PID         PSS        SIZE\n"


def test_bytes_by_pid():
    text = (
        HEAD
        + "user                     llama-server     7979    3174400K\n"
        + "user                    python3 train     7980    1024K\n"
        + "user                     llama-server     7979        10K\n"
        + "total                                               3175434K\n"
    )
    assert parse_clients(text.encode()) == NvmapClients(
        {7979: 3174410 * KIB, 7980: 1024 * KIB}, 3175434 * KIB
    )


def test_size_counts_and_not_the_part_a_cpu_has_mapped():
    text = PSS_HEAD + "user     nvargus-daemon  1012   0K    76K\ntotal      64K   76K\n"
    assert parse_clients(text.encode()) == NvmapClients({1012: 76 * KIB}, 76 * KIB)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_list_says_nothing(text):
    assert parse_clients(text.encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        "CLIENT PROCESS PID\ntotal 1K\n",
        HEAD,
        HEAD + "user llama 7979 3174400K\n",
        HEAD + "user llama 7979 -1K\ntotal 1K\n",
        HEAD + "user llama 7979 317\ntotal 1K\n",
        HEAD + "user llama pid 1K\ntotal 1K\n",
        HEAD + "user 1K\ntotal 1K\n",
        HEAD + "user llama 7979 ١K\ntotal 1K\n",
        "\x00\xff",
    ],
)
def test_a_damaged_list_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_clients(text.encode("utf-8", "replace"))


def test_the_list_is_made_twice_a_second_at_most(tmp_path):
    path = tmp_path / "sys/kernel/debug/nvmap/iovmm/clients"
    path.parent.mkdir(parents=True)

    def write(size: int) -> None:
        path.write_text(HEAD + f"user llama 7 {size}K\ntotal {size}K\n")

    nvmap = Nvmap(str(tmp_path))
    assert nvmap.clients(0.0) is None  # no such file
    write(1)
    assert nvmap.clients(0.4) is None
    assert nvmap.clients(0.5) == NvmapClients({7: KIB}, KIB)
    write(2)
    assert nvmap.clients(0.9) == NvmapClients({7: KIB}, KIB)
    assert nvmap.age_ms(0.9) == 400
    assert nvmap.clients(0.9, fresh=True) == NvmapClients({7: 2 * KIB}, 2 * KIB)
    path.write_text("")
    with pytest.raises(Unreadable, match="empty; it listed clients before"):
        nvmap.clients(2.0)
    write(3)
    assert nvmap.clients(2.5) == NvmapClients({7: 3 * KIB}, 3 * KIB)
