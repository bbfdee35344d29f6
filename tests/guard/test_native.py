"""C programs against the guard: preloaded as in production, and with sanitizers compiled in."""

import os
import shutil
from pathlib import Path

import pytest

from tests.guard import guarded

pytestmark = pytest.mark.slow
CORNERS = [
    *("border", "zeroed", "aligned", "threads", "leak", "fenced", "forked", "pages", "race"),
    "transparent",
]
# ASan answers an impossible size with its own report unless told to return NULL.
ASAN = "allocator_may_return_null=1:detect_leaks=0"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    for name in ("corners", "exact", "stress"):
        guarded.compile_native(folder, name)
    return folder


@pytest.mark.parametrize("case", CORNERS)
def test_corner(programs: Path, case: str) -> None:
    done = guarded.native(programs / "corners", case, programs / "libc10.so")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_double_free_ends_the_process_and_says_why(programs: Path) -> None:
    done = guarded.native(programs / "corners", "double_free", programs / "libc10.so")
    assert done.returncode == -6
    assert "not allocated" in done.stderr


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_no_byte_over_the_limit_in_10000_tries(programs: Path, threads: int) -> None:
    limit = (96 << 20) + 12345
    done = guarded.native(programs / "exact", programs / "libc10.so", threads, 10_000, threads)
    assert done.returncode == 0, done.stderr
    refusals, highest = map(int, done.stdout.split())
    assert refusals > 1000
    assert limit - (4 << 20) < highest <= limit


def test_random_load_leaves_nothing_behind(programs: Path) -> None:
    """10 s; UMAD_GUARD_STRESS_S=3600 and --timeout=4000 for the hour."""
    seconds = float(os.environ.get("UMAD_GUARD_STRESS_S", "10"))
    done = guarded.native(
        programs / "stress", programs / "libc10.so", 4, seconds, 1, timeout_s=seconds + 60
    )
    assert done.returncode == 0, done.stderr
    operations, refusals, growth_kib = map(int, done.stdout.split())
    assert operations > 10_000
    assert refusals > 100
    assert growth_kib < 8 << 10


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    flags = (f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
    program = guarded.compile_native(tmp_path, "stress", *flags, guard_inside=True)
    done = guarded.native(
        program,
        *(tmp_path / "libc10.so", 4, 6, 3),
        guarded=False,
        ASAN_OPTIONS=ASAN,
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_stress_under_valgrind(tmp_path: Path) -> None:
    """1 s under memcheck; UMAD_GUARD_VALGRIND_S=600 for longer.

    In smaller ranges, since valgrind has room for no larger ones.  Addresses only: it takes pages
    that the kernel has cleared for what they held before.  Helgrind and DRD know nothing of locks
    that are futexes and report each of them; ThreadSanitizer, above, does know.
    """
    if shutil.which("valgrind") is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("valgrind is missing: apt-get install valgrind libc6-dbg")
    seconds = float(os.environ.get("UMAD_GUARD_VALGRIND_S", "1"))
    small = ("-DSHIFT_WANTED=26", "-DSHIFT_LEAST=26")
    guarded.compile_native(tmp_path, "stress", *small, guard_inside=True)
    done = guarded.native(
        Path("valgrind"),
        *("--quiet", "--undef-value-errors=no", "--fair-sched=try", "--error-exitcode=9"),
        *(tmp_path / "stress", tmp_path / "libc10.so", 3, seconds, 3),
        guarded=False,
        timeout_s=seconds + 90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[0]) > 100


@pytest.mark.parametrize(
    "case", [case for case in CORNERS if case not in ("forked", "transparent")]
)
def test_corner_under_sanitizers(tmp_path: Path, case: str) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = guarded.compile_native(tmp_path, "corners", *flags, guard_inside=True)
    done = guarded.native(program, case, tmp_path / "libc10.so", guarded=False, ASAN_OPTIONS=ASAN)
    assert (done.returncode, done.stderr) == (0, "")


def test_plain_programs_run_under_the_guard(programs: Path) -> None:
    """Programs that know nothing of it, not attached."""
    for command in (["/bin/ls", "-l", "/"], ["/bin/sh", "-c", "ls / | sort | wc -l"]):
        done = guarded.native(Path(command[0]), *command[1:])
        assert done.returncode == 0, done.stderr
