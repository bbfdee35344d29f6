"""Linear layers that take the faster way give what torch's own give, and only they take it."""

import contextlib
import copy
from collections.abc import Iterator

import pytest

from umad.serve.linear import vendor

pytestmark = [pytest.mark.models, pytest.mark.slow]
torch = pytest.importorskip("torch")

from umad.serve import linear  # noqa: E402  it imports torch


@pytest.fixture(autouse=True)
def another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine."""
    monkeypatch.setattr(linear, "_pays", lambda: True)
    monkeypatch.setattr(linear, "_is_onednns", lambda: True)


def layers(
    bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """The same one, torch's and quickened."""
    torch.manual_seed(7)
    plain = torch.nn.Linear(384, 512, bias=bias, dtype=dtype).requires_grad_(False)
    quick = copy.deepcopy(plain)
    linear.quicken(torch.nn.ModuleList([quick]))
    assert type(quick) is linear.Linear
    return plain, quick


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(384,), (1, 384), (2, 0, 384), (15, 384), (16, 384), (3, 11, 384), (257, 384)]
)
def test_it_is_the_same_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, quick = layers(bias)
    with torch.inference_mode():
        given = torch.randn(shape)
        expected, found = plain(given), quick(given)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # And of a view whose rows do not lie together.
        if given.dim() == 3:
            torch.testing.assert_close(
                quick(given.transpose(0, 1)), plain(given.transpose(0, 1)), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 300])
def test_it_is_the_same_layer_in_bfloat16(rows: int) -> None:
    plain, quick = layers(dtype=torch.bfloat16)
    with torch.inference_mode():
        given = torch.randn(1, rows, 384, dtype=torch.bfloat16)
        torch.testing.assert_close(quick(given), plain(given), rtol=2e-2, atol=2e-2)


def test_few_rows_and_other_numbers_go_torchs_own_way() -> None:
    plain, quick = layers()
    with torch.inference_mode():
        few = torch.randn(linear.LEAST[torch.float32] - 1, 384)
        assert torch.equal(quick(few), plain(few))
    given = torch.randn(64, 384, requires_grad=True)
    quick(given).sum().backward()  # a gradient can be had
    assert given.grad is not None


def test_only_large_layers_of_float32_and_those_of_bfloat16_are_quickened() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList(
        [
            torch.nn.Linear(384, 384),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 8, dtype=torch.bfloat16),
            torch.nn.Linear(384, 384, dtype=torch.float16),
            torch.nn.Linear(384, 384, device="meta"),
            Own(384, 384),
        ]
    )
    linear.quicken(model)
    quick = [type(layer) is linear.Linear for layer in model]
    assert quick == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (16, [16]),
        (17, [32]),
        (40, [32, 16]),
        (129, [128, 16]),
        (160, [128, 32]),
        (200, [128, 64, 16]),
        (225, [128, 64, 32, 16]),
        (600, [128, 128, 128, 128, 64, 16, 16]),
        (120, [128]),
    ],
)
def test_rows_are_done_in_pieces_of_few_sizes(rows: int, sizes: list[int]) -> None:
    assert linear.pieces(rows, 128, 16) == sizes


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(2, [4]), (4, [4]), (5, [8]), (12, [8, 4]), (15, [16]), (20, [16, 4]), (140, [128, 8, 4])],
)
def test_of_bfloat16_the_pieces_may_be_smaller(rows: int, sizes: list[int]) -> None:
    assert linear.pieces(rows, 128, 4) == sizes


@pytest.mark.parametrize("least", [4, 16])
def test_little_is_padded_and_no_other_kernel_is_needed(least: int) -> None:
    for rows in range(least, 2048):
        for most in (16, 64, 128):
            sizes = linear.pieces(rows, most, least)
            assert rows <= sum(sizes) <= max(rows + least - 1, 1.15 * rows, rows + 3)
            assert set(sizes) <= {4, 8, 16, 32, 64, 128}
            assert least <= min(sizes) <= max(sizes) <= most


def test_a_piece_is_small() -> None:
    assert [linear.rows_max(one) for one in (384, 4096, 11008, 128_000)] == [128, 128, 32, 16]


def test_all_kernels_are_made_while_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(linear.Linear, "_piece", lambda _self, rows: seen.append(len(rows)))
    monkeypatch.setattr(linear.Linear, "forward", lambda self, rows: self._piece(rows))
    linear.quicken(torch.nn.ModuleList([torch.nn.Linear(384, 512) for _ in range(3)]))
    assert seen == [128, 64, 32, 16]
    seen.clear()
    linear.quicken(torch.nn.Linear(384, 512, dtype=torch.bfloat16))
    assert seen == [128, 64, 32, 16, 8, 4, 1]


def test_kernels_are_made_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []
    monkeypatch.setattr(linear, "_home", linear._home)
    monkeypatch.setattr(linear, "_make_kernels", lambda _layer: inside.append("made"))

    @contextlib.contextmanager
    def home() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    linear.keep_kernels_in(home)
    linear.quicken(torch.nn.Linear(384, 512))
    assert inside == ["in", "made", "out"]


@pytest.mark.parametrize(
    ("cpuinfo", "made_by"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x\n", "AuthenticAMD"),
        ("processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\n", ""),
    ],
)
def test_who_made_it(cpuinfo: str, made_by: str) -> None:
    assert vendor(cpuinfo) == made_by


def test_where_it_does_not_pay_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_pays", lambda: False)
    layer = torch.nn.Linear(384, 512)
    linear.quicken(layer)
    assert type(layer) is torch.nn.Linear
