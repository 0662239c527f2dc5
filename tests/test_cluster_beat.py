"""The heart: whose slots a worker frees after which beats."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.beat import Heart
from forebay.workers.job import Holder


def holder(epoch: int) -> Holder:
    return Holder(name="c1-ingress", epoch=epoch)


def test_a_new_epoch_frees_the_old_one_at_once() -> None:
    heart = Heart()
    assert heart.answered(holder(1)) is None
    assert heart.answered(holder(1)) is None
    assert heart.answered(holder(2)) == holder(1)


def test_one_lost_beat_frees_nothing() -> None:
    heart = Heart()
    heart.answered(holder(1))
    assert heart.failed(0.0) is None
    assert heart.answered(holder(1)) is None
    assert heart.failed(10.0) is None


def test_three_failed_beats_over_a_second_free_the_holder_once() -> None:
    heart = Heart()
    heart.answered(holder(1))
    assert [heart.failed(t) for t in (0.0, 0.3, 0.6, 0.9)] == [None] * 4
    assert heart.failed(1.0) == holder(1)
    assert heart.failed(1.3) is None


def test_two_slow_beats_are_not_enough() -> None:
    heart = Heart()
    heart.answered(holder(1))
    assert heart.failed(0.0) is None
    assert heart.failed(5.0) is None
    assert heart.failed(5.1) == holder(1)


def test_a_call_of_an_old_epoch_is_not_admitted() -> None:
    heart = Heart()
    heart.answered(holder(2))
    assert not heart.admits(holder(1))
    assert heart.admits(holder(3))
    assert heart.adopt(holder(3)) == holder(2)


def test_what_a_silent_ingress_takes_later_is_freed_again() -> None:
    heart = Heart()
    heart.answered(holder(1))
    for t in (0.0, 0.5, 1.0):
        heart.failed(t)
    assert heart.adopt(holder(1)) is None
    assert heart.failed(1.2) == holder(1)


@given(st.lists(st.tuples(st.floats(0.05, 2.0), st.one_of(st.none(), st.integers(1, 3))), max_size=40))
def test_every_holder_that_was_adopted_is_freed_or_is_the_present_one(beats: list[tuple[float, int | None]]) -> None:
    """Against the definition: a run of failures frees as soon as it has three of them and a second of age."""
    heart, now, epoch = Heart(), 0.0, 0
    adopted, freed, run = [], [], []
    for wait_s, answer in beats:
        now += wait_s
        if answer is None:
            run.append(now)
            gone = heart.failed(now)
            due = len(run) >= 3 and run[-1] - run[0] >= 1.0
            assert (gone is not None) == (due and len(adopted) > len(freed))
        else:
            run, epoch = [], epoch + (answer == 3)
            gone = heart.answered(holder(epoch))
            if heart.holder not in adopted[len(freed) + (gone is not None) :]:
                adopted.append(holder(epoch))
        if gone is not None:
            freed.append(gone)
    assert adopted[len(freed) :] == ([heart.holder] if heart.holder else [])
    assert adopted[: len(freed)] == freed
