"""Several jobs at once in a real engine: each its own answer, and only the culprit its error."""

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.serve.processes import EngineProcess, engine_process, write_config
from tests.serve.standin import run, until
from umad.errors import (
    InvalidParams,
    ModelFailed,
    QuotaDenied,
    UmadError,
    WaitedTooLong,
    WorkerLost,
    WorkerRevoked,
)

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("isolation", ["thread", "process"])


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


class Model:
    """A model that does several jobs at once, its files, and what it was seen to do."""

    def __init__(self, engine: EngineProcess, folder: Path) -> None:
        self.engine = engine
        self.name = folder.name
        self.folder = folder

    def ask(self, prompt: str, **job: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(
            self.engine.run(self.name, prompt=prompt, max_tokens=job.pop("max_tokens", 1), **job)
        )

    async def hold(self, prompt: str = "first", **job: Any) -> "asyncio.Future[Any]":
        """A job whose forward does not end before ``release``."""
        (self.folder / "waiting").unlink(missing_ok=True)
        (self.folder / "hold").touch()
        work = self.ask(prompt, **job)
        await until((self.folder / "waiting").exists)
        return work

    async def all_wait(self) -> None:
        """All that were asked before have come to the queue: one that comes now is refused."""
        await refused(self.ask("late", deadline_s=0.02), WaitedTooLong)

    def release(self) -> None:
        (self.folder / "hold").unlink()

    @property
    def forwards(self) -> list[list[str]]:
        log = self.folder / "forwards"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines]


async def ready(tmp_path: Path, engine: EngineProcess, name: str) -> Model:
    async with asyncio.timeout(50):
        await engine.ready(name)
    return Model(engine, tmp_path / name)


async def refused(work: Awaitable[Any], kind: type[UmadError]) -> None:
    with pytest.raises(kind):
        await work


def test_those_that_wait_go_together_and_each_gets_its_own(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            first = await model.hold()
            others = {name: model.ask(name) for name in "abcde"}
            refusal, long = model.ask("nonsense"), model.ask("long", tokens=900)
            await model.all_wait()
            others["c"].cancel()
            await model.all_wait()
            model.release()
            assert (await first)["text"] == "first"
            for name in "abde":
                assert (await others[name])["text"] == name
            assert (await long)["text"] == "long"
            await refused(refusal, InvalidParams)
            assert model.forwards == [["first"], ["a", "b", "d", "e"], ["long"]]
            await until(lambda: len(daemon.of("forward_done")) == 3)
            assert [told["batch"] for told in daemon.of("forward_done")] == [1, 4, 1]
            await until(lambda: engine.link.status("together")["work"]["rows_sum"] == 6)
            work = engine.link.status("together")["work"]
            assert sum(work["batches"].values()) == 3
            assert work["rows"][:4] == [2, 0, 1, 0]

    run(scenario())


def test_c33_of_a_thousand_at_once_each_gets_its_own(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            chance = random.Random(33)
            names = [str(number) for number in range(1000)]
            work = [model.ask(name, tokens=chance.choice((5, 8, 60))) for name in names]
            answers = await asyncio.gather(*work)
            assert [answer["text"] for answer in answers] == names
            together = model.forwards
            assert sorted(itertools.chain(*together), key=int) == names
            assert max(map(len, together)) > 1

    run(scenario())


def test_c33_whose_client_has_left_is_in_no_forward(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            first = await model.hold()
            work = {str(number): model.ask(str(number)) for number in range(50)}
            await model.all_wait()
            for name in list(work)[:40]:
                work.pop(name).cancel()
            await model.all_wait()
            model.release()
            await first
            await asyncio.gather(*work.values())
            assert sorted(itertools.chain(*model.forwards[1:])) == sorted(work)

    run(scenario())


def test_a_process_of_its_own_is_given_several_at_once(tmp_path, daemon):
    async def scenario():
        config = write_config(tmp_path, {"together": {"isolation": "process"}})
        async with engine_process(config) as engine:
            model = await ready(tmp_path, engine, "together")
            async with asyncio.timeout(30):
                while True:  # until they have come to the child before it was done with the first
                    first = await model.hold()
                    names = [str(number) for number in range(30)]
                    others = [model.ask(name) for name in names]
                    await asyncio.sleep(0.02)
                    model.release()
                    await first
                    assert [answer["text"] for answer in await asyncio.gather(*others)] == names
                    if max(map(len, model.forwards)) > 1:
                        break
            child = (await model.ask("who"))["pid"]
            # One that dies takes what it was given with it, and nothing else.
            first = await model.hold()
            second = model.ask("second")
            os.kill(child, signal.SIGKILL)
            for work in (first, second):
                await refused(work, WorkerLost)

    run(scenario())


def test_only_those_that_are_alike_are_in_one_forward(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            first = await model.hold()
            work = [model.ask(name, alike=name.upper()) for name in "abaab"]
            await model.all_wait()
            model.release()
            await first
            assert [answer["text"] for answer in await asyncio.gather(*work)] == list("abaab")
            assert model.forwards[1:] == [["a", "a", "a"], ["b", "b"]]
            assert engine.link.at_once("together") == 128

    run(scenario())


def test_a_batch_that_fails_is_done_one_by_one(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            first = await model.hold()
            good = [model.ask(name) for name in ("a", "memory", "b")]
            bad = model.ask("raise")
            await model.all_wait()
            model.release()
            await first
            assert [(await one)["text"] for one in good] == ["a", "memory", "b"]
            await refused(bad, ModelFailed)
            assert model.forwards[1:] == [
                ["a", "memory", "b", "raise"],
                ["a"],
                ["memory"],
                ["b"],
                ["raise"],
            ]
            assert engine.state("together") == "ready"

    run(scenario())


def test_a_batch_stays_within_the_quota_and_one_beyond_it_is_booked(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"together": {}})) as engine:
            model = await ready(tmp_path, engine, "together")
            (model.folder / "large").touch()  # 300 bytes each, and 1000 are left of the quota
            first = await model.hold()
            others = [model.ask(name) for name in "abcde"]
            await model.all_wait()
            model.release()
            await asyncio.gather(first, *others)
            assert model.forwards[1:] == [["a", "b", "c"], ["d", "e"]]
            assert daemon.of("admit") == []
            await model.ask("huge", need=1500)
            assert [asked["bytes"] for asked in daemon.of("admit")] == [500]

    run(scenario())


@pytest.mark.parametrize("name", ["together", "joins"])
def test_a_revoke_answers_all_that_are_at_work(tmp_path, daemon, name):
    async def scenario():
        async with engine_process(write_config(tmp_path, {name: {}})) as engine:
            model = await ready(tmp_path, engine, name)
            first = await model.hold()
            (model.folder / "waiting").unlink()
            work = [model.ask(prompt, max_tokens=9) for prompt in ("a", "b", "stuck")]
            await model.all_wait()
            model.release()
            await first
            await until((model.folder / "waiting").exists)
            worker = daemon.of("progress")[-1]["worker"]
            daemon.tell(
                "revoke",
                worker=worker,
                reason="over its quota",
                quota=2000,
                measured=9000,
                source="pss",
                grace_s=0.1,
            )
            for one in work:
                await refused(one, WorkerRevoked)
            async with asyncio.timeout(30):
                await engine.ready(name)
            assert (await model.ask("again"))["text"] == "again"

    run(scenario())


@BOTH
def test_answers_join_and_leave_and_are_told_as_they_grow(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"joins": {"isolation": isolation}})
        async with engine_process(config) as engine:
            model = await ready(tmp_path, engine, "joins")
            told: list[str] = []
            first = await model.hold("one", max_tokens=1 << 30)
            streamed = asyncio.ensure_future(
                engine.link.run(
                    "joins",
                    {"prompt": "s", "max_tokens": 3},
                    request="streamed",
                    deadline_s=10,
                    on_chunk=lambda text, _: told.append(text),
                )
            )
            lost = model.ask("lost", max_tokens=1 << 30)
            await asyncio.sleep(0)
            model.release()
            assert (await streamed)["text"] == "sss"
            assert told == ["s"] * 3
            await until(lambda: ["one", "lost"] in model.forwards)
            assert any("s" in names and "one" in names for names in model.forwards)
            lost.cancel()
            await until(lambda: model.forwards[-1] == ["one"])
            first.cancel()
            await until(lambda: len(daemon.of("forward_done")) == 1)
            assert 2 <= daemon.of("forward_done")[0]["batch"] <= 3
            await until(lambda: engine.link.status("joins")["work"]["growing"] == 0)
            assert (await model.ask("on"))["text"] == "on"
            assert model.forwards[-1] == ["on"]

    run(scenario())


def test_one_that_fails_leaves_and_the_others_grow_on(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")
            first = await model.hold("a", max_tokens=4)
            bad, good = model.ask("raise", max_tokens=3), model.ask("memory", max_tokens=2)
            await model.all_wait()
            model.release()
            await refused(bad, ModelFailed)
            assert (await first)["text"] == "aaaa"
            assert (await good)["text"] == "memorymemory"
            assert engine.link.status("joins")["work"]["restarts"] == 0

    run(scenario())


def test_one_that_no_memory_is_left_for_goes_on_when_another_has_left(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")
            told: list[str] = []
            first = await model.hold("a", max_tokens=7)
            late = model.ask("late", max_tokens=4)
            await asyncio.sleep(0)
            newest = asyncio.ensure_future(
                engine.link.run(
                    "joins",
                    {"prompt": "c", "max_tokens": 5},
                    request="newest",
                    deadline_s=10,
                    on_chunk=lambda text, _: told.append(text),
                )
            )
            await model.all_wait()
            model.release()
            assert (await late)["text"] == "late" * 4
            assert (await first)["text"] == "a" * 7
            assert (await newest)["text"] == "c" * 5
            assert told == ["c"] * 5  # nothing twice
            both, three, newer = ["a", "late"], ["a", "late", "c"], ["a", "c"]
            began = model.forwards.index(three)
            # The third step was refused and done again without the newest.
            assert model.forwards[began:] == [*3 * [three], *2 * [both], *2 * [newer], ["c"]]
            await until(lambda: engine.link.status("joins")["work"]["set_aside"] == 1)
            await until(lambda: engine.logged("answer.set_aside"))
            assert engine.logged("model.error") == engine.logged("model.over_quota") == []
            assert engine.state("joins") == "ready"

    run(scenario())


def test_one_that_waits_for_others_may_leave_and_none_joins_before_it(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")
            first = await model.hold("late", max_tokens=1 << 30)
            second = model.ask("b", max_tokens=1 << 30)
            await asyncio.sleep(0)
            third = model.ask("c", max_tokens=1 << 30)
            await model.all_wait()
            model.release()
            await until(lambda: ["late", "b", "c"] in model.forwards)
            await until(lambda: model.forwards[-1] == ["late", "b"])
            fourth = model.ask("d", max_tokens=1 << 30)
            await model.all_wait()
            count = len(model.forwards)
            await until(lambda: len(model.forwards) > count + 5)
            assert model.forwards[-1] == ["late", "b"]
            third.cancel()
            # It is tried, and gives way in turn.
            await until(lambda: ["late", "b", "d"] in model.forwards)
            second.cancel()
            await until(lambda: model.forwards[-1] == ["late", "d"])
            first.cancel()
            await until(lambda: model.forwards[-1] == ["d"])
            fourth.cancel()
            await until(lambda: engine.link.status("joins")["work"]["growing"] == 0)
            assert engine.link.status("joins")["work"]["restarts"] == 0

    run(scenario())


def test_what_a_turn_without_end_takes_is_told_as_it_goes_on(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")
            endless = model.ask("a", max_tokens=1 << 30)
            while len(daemon.of("forward_done")) < 2:
                await model.ask("b", max_tokens=2)
            for told in daemon.of("forward_done"):
                assert (told["tokens"], told["batch"]) == (5, 2)
                assert 1.0 <= told["seconds"] < 30
            assert not endless.done()
            endless.cancel()

    run(scenario())


def test_bytes_beyond_the_quota_are_booked_for_each_and_given_back_as_it_leaves(tmp_path, daemon):
    """1000 bytes are left of the quota: the first needs 800, the second 600, the third as many."""
    refuse = True

    def admit(params: dict[str, Any]) -> Any:
        if refuse and params["bytes"] > 500:
            raise QuotaDenied("no room for that much now")
        return daemon.grant(params["bytes"])

    daemon.handlers["admit"] = admit

    async def scenario():
        nonlocal refuse
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")
            steady = len(daemon.leases)
            first = await model.hold("a", need=800, max_tokens=2)
            second = model.ask("b", need=600, max_tokens=1 << 30)
            third = model.ask("c", need=600, max_tokens=1 << 30)
            await model.all_wait()
            model.release()
            assert (await first)["text"] == "aa"  # the others have joined only as there was room
            asked = [(told["bytes"], told["wait_s"]) for told in daemon.of("admit")]
            assert asked[0] == (400, 0.0)
            await until(lambda: ["b", "c"] in model.forwards)
            second.cancel()
            await until(lambda: ["c"] in model.forwards)
            await until(lambda: len(daemon.leases) == steady)  # c fits without
            third.cancel()
            await until(lambda: engine.link.status("joins")["work"]["growing"] == 0)
            assert daemon.leaked == 0
            # Who is alone may wait for a booking, and hears if it is refused.
            await refused(model.ask("d", need=2000), QuotaDenied)
            assert daemon.of("admit")[-1]["wait_s"] > 5
            refuse = False
            assert (await model.ask("d", need=2000))["text"] == "d"
            await until(lambda: len(daemon.leases) == steady)

    run(scenario())


def test_what_is_kept_of_prompts_gives_way_before_anything_is_booked(tmp_path, daemon):
    """1000 bytes are left of the quota; a quarter of them may be kept."""

    async def scenario():
        async with engine_process(write_config(tmp_path, {"joins": {}})) as engine:
            model = await ready(tmp_path, engine, "joins")

            async def kept(size: int) -> None:
                await until(lambda: engine.link.status("joins")["work"]["kept_bytes"] == size)

            await model.ask("a", keeps=100, spares=7)
            await kept(100)
            await model.ask("b", keeps=900, spares=700)
            await kept(250)
            # What it would have taken else is counted, as far as that was expected.
            await until(lambda: [one["peak"] for one in daemon.of("forward_done")] == [7, 10])
            # So much is needed beside: first for one alone, then for one that joins.
            await model.ask("c", need=850)
            await kept(150)
            await model.ask("a", keeps=900)
            await kept(250)
            first = await model.hold("d", need=700, max_tokens=1 << 30)
            second = model.ask("e", need=200, max_tokens=1 << 30, keeps=900)
            await model.all_wait()
            model.release()
            await until(lambda: ["d", "e"] in model.forwards)
            await kept(100)  # and those that grow need the rest
            assert daemon.of("admit") == []
            third = model.ask("f", need=200, max_tokens=2)
            await third
            assert [told["bytes"] for told in daemon.of("admit")] == [100]
            await kept(0)
            for work in (first, second):
                work.cancel()
            await model.ask("a", keeps=900)
            await kept(250)
            # The guard has refused it: all that is kept goes, and it is not the one that fails.
            await model.ask("tight")
            await kept(0)
            await model.ask("a", keeps=900)
            await kept(250)
            daemon.tell("evict", worker=daemon.of("progress")[-1]["worker"], reason="for another")
            await until(lambda: engine.state("joins") == "cold")
            await kept(0)
            assert daemon.leaked == 0

    run(scenario())


@BOTH
def test_what_is_kept_of_prompts_goes_when_the_machine_is_short(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"joins": {"isolation": isolation}})
        async with engine_process(config) as engine:
            model = await ready(tmp_path, engine, "joins")

            async def kept(size: int) -> None:
                await until(lambda: engine.link.status("joins")["work"]["kept_bytes"] == size)

            await model.ask("a", keeps=100)
            await kept(100)
            daemon.tell("shrink", reason="short of memory")  # while it rests
            await kept(0)
            await model.ask("b", keeps=100)  # nor is anything kept soon after
            await until(lambda: engine.link.status("joins")["work"]["rows_sum"] == 2)
            await kept(0)

    run(scenario())


@BOTH
def test_who_has_to_go_finishes_those_at_work_and_lets_none_join(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"joins": {"isolation": isolation}})
        async with engine_process(config) as engine:
            model = await ready(tmp_path, engine, "joins")
            first = await model.hold("a", max_tokens=3)
            daemon.tell("evict", worker=daemon.of("progress")[-1]["worker"], reason="for another")
            await until(lambda: engine.state("joins") == "draining")
            later = model.ask("b", deadline_s=50)
            await until(lambda: bool(daemon.of("keep")))
            model.release()
            assert (await first)["text"] == "aaa"
            assert (await later)["text"] == "b"  # by the next one
            assert model.forwards == [["a"]] * 3 + [["b"]]
            assert (tmp_path / "loads").read_text().split() == ["joins", "joins"]

    run(scenario())
