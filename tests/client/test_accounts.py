"""This process's account page, while a restarted daemon has it replaced."""

import os
import sys
import threading
from contextlib import closing

import pytest

from umad.client.accounts import ProcessPage
from umad.guard.page import AccountPage


def test_a_page_is_read_while_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umad.guard.account.attach", lambda _: None)
    mine = ProcessPage()
    failed: list[Exception] = []
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.is_set():
                mine.used(0), mine.refused(0), mine.requested(0)
        except ValueError as error:
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        with closing(AccountPage.create(1)) as page:
            for _ in range(300):
                assert mine.attach(os.dup(page.fd))
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval_s)
    assert failed == []
