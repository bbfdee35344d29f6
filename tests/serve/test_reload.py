"""The front reads its configuration again: what takes effect, and what a bad file changes."""

import os
from pathlib import Path

from tests.serve.processes import read_settings, write_config
from tests.serve.standin import run
from umad.serve.app import create_app
from umad.serve.link import EngineLink
from umad.serve.main import kept
from umad.serve.reload import Reloader


def test_new_settings_take_effect_and_a_bad_file_changes_nothing(tmp_path: Path):
    config = write_config(tmp_path, {"one": {}})
    text, settings = config.read_text(), read_settings(config)
    link, fd = EngineLink(settings), kept(text)
    front = create_app(settings, link).state.front
    reloader = Reloader(str(config), text, settings, fd, front, link)

    def next_engine_reads() -> str:
        return Path(f"/proc/self/fd/{fd}").read_text()

    async def scenario():
        config.write_text("[nonsense")
        await reloader.reload()
        assert "nothing was started" in front.configuration["problem"]
        assert list(front.asking.models) == ["one"]
        assert next_engine_reads() == text

        new = write_config(tmp_path, {"two": {"instances": 2}}, 'wait_max = "3s"\nqueue_max = 1')
        await reloader.reload()
        assert front.configuration["problem"] == ""
        assert list(front.asking.models) == ["two"]
        assert link.ready() == (0, 1)
        assert len(link.status("two")["instances"]) == 2
        assert front.asking.wait_max_s == 3
        assert (front.gate._serve.queue_max, link.at_once("two")) == (1, 2)
        assert next_engine_reads() == new.read_text()

        new.unlink()
        await reloader.reload()
        assert "cannot be read" in front.configuration["problem"]
        assert list(front.asking.models) == ["two"]

    try:
        run(scenario())
    finally:
        os.close(fd)
