from umad.core.mutex import InitMutex


def test_one_holder_and_rising_tokens() -> None:
    mutex = InitMutex()
    first = mutex.take(1, 10.0)
    assert first is not None
    assert mutex.take(2, 10.0) is None
    assert not mutex.give_back(1, first.token + 1)
    assert not mutex.give_back(2, first.token)
    assert not mutex.take_away(2)
    assert mutex.give_back(1, first.token)
    second = mutex.take(1, 10.0)
    assert second is not None
    assert second.token > first.token
    assert not mutex.give_back(1, first.token)
    assert mutex.take_away(1)
    assert mutex.holder is None
