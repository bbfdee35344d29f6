"""The link's two ends: answers, deaths, garbage, sizes."""

import asyncio
import socket

import pytest

from tests.serve.standin import KINDS, READY, StandIn, make_settings, run, text_handler, until
from umad.errors import InvalidParams, ModelFailed, ModelLoading, UmadError, WorkerLost
from umad.serve.figures import Figures, sum_of
from umad.serve.link import (
    EngineLink,
    LinkPeer,
    ModelState,
    link_limits,
    pack_vector,
    unpack_vector,
)
from umad.serve.work_metrics import families

WORK = {
    "batches": {"window": 2},
    "rows": [1, 0, 0, 0, 1, 0, 0, 0],
    "rows_sum": 12,
    "growing": 3,
    "prompt_tokens": 700,
    "cached_tokens": 600,
    "kept_bytes": 4096,
    "set_aside": 2,
    "restarts": 0,
}


async def pair(settings=None, handler=text_handler):
    settings = settings or make_settings()
    ours, theirs = socket.socketpair()
    engine = StandIn(settings, handler)
    await engine.peer.open(theirs)
    link = EngineLink(settings)
    lost = await link.attach(ours)
    return link, engine, lost


def test_a_large_job_and_a_large_answer_travel_whole():
    async def handler(_model, job):
        return {"images": [job["image"]]}

    async def scenario():
        link, engine, lost = await pair(handler=handler)
        image = bytes(range(256)) * (31 << 12)  # 31 MiB, body_max is 32
        result = await link.run("see", {"image": image}, request="a", deadline_s=1)
        assert result["images"] == [image]
        engine.end()
        await lost.wait()

    run(scenario())


def test_what_is_too_large_fails_alone():
    async def handler(_model, job):
        return {"text": "x" * job["size"]}

    async def scenario():
        link, engine, lost = await pair(handler=handler)
        limit = link_limits(make_settings()).message_bytes
        with pytest.raises(ModelFailed, match="cannot travel"):
            await link.run("talk", {"size": limit}, request="a", deadline_s=1)
        with pytest.raises(InvalidParams):
            await link.run("talk", {"prompt": "x" * limit}, request="b", deadline_s=1)
        assert (await link.run("talk", {"size": 1}, request="c", deadline_s=1))["text"] == "x"
        engine.end()
        await lost.wait()

    run(scenario())


def test_a_death_fails_what_is_open_and_what_comes_after():
    async def stuck(_model, _job):
        await asyncio.Event().wait()

    async def scenario():
        link, engine, lost = await pair(handler=stuck)
        engine.tell("talk", READY)
        await until(lambda: link.status("talk")["state"] == "ready")
        work = asyncio.ensure_future(link.run("talk", {}, request="a", deadline_s=1))
        await until(lambda: engine.at_work == 1)
        engine.end()
        with pytest.raises(WorkerLost):
            await work
        await lost.wait()
        link.back_in_s = 7.0
        with pytest.raises(WorkerLost) as caught:
            await link.run("talk", {}, request="b", deadline_s=1)
        assert caught.value.retry_after_s == 7.0
        with pytest.raises(WorkerLost):
            link.check("talk")
        assert link.ready() == (0, len(KINDS))
        await link.stop(1)  # nobody there: nothing happens

    run(scenario())


def test_cancelling_tells_the_engine_and_a_late_answer_harms_nothing():
    release = asyncio.Event()

    async def handler(model, job):
        await release.wait()
        return await text_handler(model, job)

    async def scenario():
        link, engine, lost = await pair(handler=handler)
        work = asyncio.ensure_future(link.run("talk", {"prompt": "a"}, request="a", deadline_s=1))
        await until(lambda: engine.at_work == 1)
        work.cancel()
        await until(lambda: engine.cancelled == ["a"])
        release.set()
        await until(lambda: engine.at_work == 0)
        result = await link.run("talk", {"prompt": "b"}, request="b", deadline_s=1)
        assert result["text"] == "b"
        engine.end()
        await lost.wait()

    run(scenario())


def test_chunks_come_in_order_and_before_the_answer():
    async def handler(_model, job, emit):
        for piece in job["pieces"]:
            emit(piece)
            await asyncio.sleep(0)
        return {"text": "".join(job["pieces"])}

    async def scenario():
        link, engine, lost = await pair(handler=handler)
        told: dict[str, list[str]] = {"a": [], "b": []}
        jobs = {"a": ["one", "", " two"], "b": [str(number) for number in range(300)]}
        answers = await asyncio.gather(
            *(
                link.run(
                    "talk",
                    {"pieces": jobs[name]},
                    request=name,
                    deadline_s=1,
                    on_chunk=lambda text, _, name=name: told[name].append(text),
                )
                for name in jobs
            )
        )
        assert told == jobs
        assert [answer["text"] for answer in answers] == ["".join(jobs["a"]), "".join(jobs["b"])]
        await link.run("talk", {"pieces": ["x"]}, request="c", deadline_s=1)
        assert engine.streamed == [True, True, False]
        engine.end()
        await lost.wait()

    run(scenario())


def test_a_chunk_of_one_that_was_cancelled_harms_nobody():
    emits = []

    async def handler(_model, _job, emit):
        emits.append(emit)
        await asyncio.Event().wait()

    async def scenario():
        link, engine, lost = await pair(handler=handler)
        told = []
        work = asyncio.ensure_future(
            link.run(
                "talk", {}, request="a", deadline_s=1, on_chunk=lambda text, _: told.append(text)
            )
        )
        await until(lambda: bool(emits))
        emits[0]("in time")
        await until(lambda: told == ["in time"])
        work.cancel()
        await until(lambda: engine.cancelled == ["a"])
        emits[0]("late")
        engine.tell("talk", READY)  # comes after it
        await until(lambda: link.status("talk")["state"] == "ready")
        assert told == ["in time"]
        engine.end()
        await lost.wait()

    run(scenario())


@pytest.mark.parametrize(
    "method_and_params",
    [
        ("nonsense", {}),
        ("chunk", {"request": "a"}),
        ("work", {"model": "talk", "instance": 0}),
        ("work", {"model": "talk", "instance": 0, **WORK, "rows": [1]}),
        ("chunk", {"request": ["a"], "text": "x"}),
        ("chunk", {"request": "a", "text": "x", "device": 1}),
        ("state", {}),
        ("state", {"model": "talk", "instance": 0, "state": "splendid"}),
        ("state", {"model": "talk", "instance": 0, "unknown": 1}),
    ],
)
def test_an_engine_that_talks_nonsense_is_dropped(method_and_params):
    async def scenario():
        link, engine, lost = await pair()
        engine.peer.notify(*method_and_params)
        await lost.wait()
        assert not link.describe()["running"]
        await engine.lost.wait()

    run(scenario())


def test_bytes_that_are_no_message_end_the_link():
    async def scenario():
        ours, theirs = socket.socketpair()
        link = EngineLink(make_settings())
        lost = await link.attach(ours)
        with theirs:
            theirs.sendall(b"\xc1garbage")
            await lost.wait()

    run(scenario())


def test_a_request_to_the_front_ends_the_link():
    async def scenario():
        ours, theirs = socket.socketpair()
        link = EngineLink(make_settings())
        lost = await link.attach(ours)
        peer = LinkPeer("server", link_limits(make_settings()))
        await peer.open(theirs)
        with pytest.raises(WorkerLost):
            await peer.call("run", {})
        await lost.wait()

    run(scenario())


def test_the_best_instance_speaks_for_its_model():
    async def scenario():
        settings = make_settings()
        link, engine, lost = await pair(settings)
        with pytest.raises(UmadError):
            link.check("talk")
        engine.tell("talk", ModelState("loading", "reading", 0.5))
        await until(lambda: link.status("talk")["state"] == "loading")
        with pytest.raises(ModelLoading, match=r"50% of reading") as caught:
            link.check("talk")
        assert caught.value.details == {
            "model": "talk",
            "state": "loading",
            "stage": "reading",
            "ratio": 0.5,
        }
        engine.end()
        await lost.wait()

    run(scenario())


def test_what_the_engine_did_is_shown_until_it_is_lost():
    async def scenario():
        link, engine, lost = await pair()
        nothing = link.status("talk")["work"]
        assert (nothing["rows_sum"], nothing["batches"]) == (0, {})
        engine.peer.notify("work", {"model": "talk", "instance": 0, **WORK})
        engine.peer.notify("work", {"model": "talk", "instance": 7, **WORK})  # there is none
        await until(lambda: link.status("talk")["work"] == WORK)
        assert link.status("see")["work"] == nothing
        shown = {family.name: family for family in families({"talk": WORK, "see": nothing})}
        rows = {
            (sample.labels.get("le"), sample.name): sample.value
            for sample in shown["umad_serve_forward_rows"].samples
            if sample.labels["model"] == "talk"
        }
        assert rows["1.0", "umad_serve_forward_rows_bucket"] == 1
        assert rows["16.0", "umad_serve_forward_rows_bucket"] == 2
        assert rows["+Inf", "umad_serve_forward_rows_bucket"] == 2
        assert rows[None, "umad_serve_forward_rows_sum"] == 12
        assert {
            sample.labels["why"]: sample.value
            for sample in shown["umad_serve_batches"].samples
            if sample.labels["model"] == "talk"
        } == {"rows": 0, "area": 0, "bytes": 0, "all": 0, "apart": 0, "window": 2}
        for name, value in {
            "umad_serve_prompt_tokens": 700,
            "umad_serve_prompt_tokens_cached": 600,
            "umad_serve_prompts_kept_bytes": 4096,
            "umad_serve_answers_set_aside": 2,
        }.items():
            assert [one.value for one in shown[name].samples] == [value, 0]
        engine.end()
        await lost.wait()
        assert link.status("talk")["work"] == nothing

    run(scenario())


def test_figures_are_told_a_few_times_a_second_and_before_a_rest():
    told = []
    figures = Figures(told.append)
    for rows in (1, 2, 3, 65, 1000):
        figures.forward(rows)
        figures.tell()
    assert [one["rows_sum"] for one in told] == [1]
    figures.tell(idle=True)
    figures.tell(idle=True)
    assert [one["rows_sum"] for one in told] == [1, 1071]
    assert told[-1]["rows"] == [1, 1, 1, 0, 0, 0, 0, 2]
    twice = sum_of([told[-1], told[-1]])
    assert (twice["rows_sum"], twice["rows"][-1]) == (2142, 4)


def test_vectors_keep_their_numbers():
    assert unpack_vector(pack_vector([0.5, -2.0, 1e-3])) == [0.5, -2.0, pytest.approx(1e-3)]
