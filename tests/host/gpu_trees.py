"""Processes with DRM descriptors, written into a tree."""

from pathlib import Path

from umad.values import Identity

C3 = "0000:c3:00.0"


def fdinfo(*lines: str, client: str | None = "17", pdev: str = C3, driver="amdgpu") -> bytes:
    head = ["pos:\t0", f"drm-driver:\t{driver}", f"drm-pdev:\t{pdev}"]
    if client is not None:
        head.append(f"drm-client-id:\t{client}")
    return "\n".join([*head, *lines, ""]).encode()


def write_process(
    root: Path,
    pid: int,
    start_ticks: int,
    files: dict[int, bytes],
    opened: str = "/dev/dri/renderD128",
) -> Identity:
    folder = root / f"proc/{pid}"
    for part in ("fd", "fdinfo"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} (w) S" + " 0" * 18 + f" {start_ticks} 0 0\n")
    (folder / "status").write_text("Name:\tw\nState:\tS (s)\nRssAnon:\t4 kB\nRssShmem:\t0 kB\n")
    for fd, data in files.items():
        (folder / f"fd/{fd}").symlink_to(opened)
        (folder / f"fdinfo/{fd}").write_bytes(data)
    return Identity(pid, start_ticks)
