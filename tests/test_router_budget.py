"""Budgets against a twin that counts in ticks, and their laws: shares, debt, lending, queues, a true Retry-After."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.router.budget import Granted, Ledger, Refused, Waiting
from forebay.router.config import ClassConfig
from forebay.router.lane import HELD_S

TICK = 1 / 16
A = ClassConfig(
    name="a",
    priority=0,
    prefill_tokens_per_s=64,
    burst_tokens=128,
    resident_bytes=1000,
    queue_requests=4,
    queue_wait_s=4,
)
B = ClassConfig(
    name="b", priority=1, prefill_tokens_per_s=32, burst_tokens=96, resident_bytes=500, queue_requests=3, queue_wait_s=4
)
SPARE_S, SHARED = 2.0, 300


def ledger(*classes, spare_s=SPARE_S, shared=SHARED):
    return Ledger(classes or (A, B), spare_s, shared, now=0.0)


def level(book, name, now=0.0):
    return next(view.level_tokens for view in book.view(now) if view.class_name == name)


def drain(book, name, now=0.0):
    """Take all there is, spare included."""
    while isinstance(decision := book.reserve(name, "drain", 8, 0, now), Granted):
        book.settle(decision.ticket, 8, now)
        book.close(decision.ticket, now)
    if isinstance(decision, Waiting):
        book.abandon(decision.id)


class Twin:
    """Every tick adds its share to each class, one at a time; sums are taken over all that happened."""

    def __init__(self):
        self.level = {each.name: Fraction(each.burst_tokens) for each in (A, B)}
        self.spare = Fraction(0)
        self.tick = 0
        self.held = {"a": [], "b": []}

    def to(self, tick):
        for _ in range(self.tick, tick):
            for each in (A, B):
                self.add(each, Fraction(each.prefill_tokens_per_s, 16))
        self.tick = tick

    def add(self, each, tokens):
        self.level[each.name] += tokens
        over = max(Fraction(0), self.level[each.name] - each.burst_tokens)
        self.level[each.name] -= over
        self.spare = min(self.spare + over, Fraction(SPARE_S) * (A.prefill_tokens_per_s + B.prefill_tokens_per_s))

    def charge(self, each, tokens):
        """Own tokens where they suffice, else all own and the rest of what is needed out of the spare."""
        need = min(tokens, each.burst_tokens)
        borrowed = Fraction(0)
        if self.level[each.name] < need:
            borrowed = need - max(Fraction(0), self.level[each.name])
            assert borrowed <= self.spare, "granted what was not there"
        self.spare -= borrowed
        self.level[each.name] -= tokens - borrowed
        return borrowed

    def settle(self, each, reserved, computed, borrowed):
        if computed > reserved:
            self.level[each.name] -= computed - reserved
            return
        to_spare = min(reserved - computed, borrowed)
        cap = Fraction(SPARE_S) * (A.prefill_tokens_per_s + B.prefill_tokens_per_s)
        self.spare = min(self.spare + to_spare, cap)
        self.add(each, reserved - computed - to_spare)


acts = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "close", "admit", "abandon"]),
        st.integers(0, 24),  # ticks that pass before
        st.sampled_from(["a", "b"]),
        st.integers(0, 200),  # tokens
        st.integers(0, 700),  # bytes
        st.integers(0, 5),  # which session or ticket
    ),
    max_size=60,
)


class History:
    """Runs acts on the ledger and the twin and compares them after each."""

    def __init__(self):
        self.book, self.twin, self.tick = ledger(), Twin(), 0
        self.tickets, self.waiting = [], {}

    def granted(self, ticket):
        config = {"a": A, "b": B}[ticket.class_name]
        self.tickets.append([ticket, config, self.twin.charge(config, ticket.tokens), False])

    def run(self, act, ticks, name, tokens, nbytes, which):
        self.tick += ticks
        self.twin.to(self.tick)
        now = self.tick * TICK
        match act:
            case "reserve":
                decision = self.book.reserve(name, f"s{which}", tokens, nbytes, now)
                if isinstance(decision, Granted):
                    self.granted(decision.ticket)
                elif isinstance(decision, Waiting):
                    self.waiting[decision.id] = now + 4
                else:
                    assert decision.retry_after_s >= 1
            case "admit":
                self.admit(now)
            case "abandon" if self.waiting:
                gone = sorted(self.waiting)[which % len(self.waiting)]
                self.book.abandon(gone)
                del self.waiting[gone]
            case "settle" if open_ := [each for each in self.tickets if not each[3]]:
                entry = open_[which % len(open_)]
                self.book.settle(entry[0], tokens, now)
                self.twin.settle(entry[1], entry[0].tokens, tokens, entry[2])
                entry[3] = True
            case "close" if self.tickets:
                self.book.close(self.tickets.pop(which % len(self.tickets))[0], now)
        self.compare()

    def admit(self, now):
        decided = self.book.admit(now)
        for waiting_id, decision in decided:
            until = self.waiting.pop(waiting_id)
            if isinstance(decision, Granted):
                assert decision.ticket.id == waiting_id
                self.granted(decision.ticket)
            else:
                assert until <= now
        assert all(until > now for until in self.waiting.values()), "nobody waits beyond the end"

    def compare(self):
        self.book.check()
        for view in self.book.view(self.tick * TICK):
            assert view.level_tokens == pytest.approx(float(self.twin.level[view.class_name]))
            mine = [each for each in self.tickets if each[0].class_name == view.class_name]
            assert view.reserved_bytes == sum(each[0].bytes for each in mine)
            assert view.reserved_tokens == sum(each[0].tokens for each in mine if not each[3])
        assert sum(view.queued for view in self.book.view(self.tick * TICK)) == len(self.waiting)


def test_any_history_agrees_with_the_twin(examples):
    @settings(max_examples=examples(2000))
    @given(acts)
    def run(history_acts):
        history = History()
        for act in history_acts:
            history.run(*act)
        for entry in history.tickets:
            history.book.close(entry[0], history.tick * TICK)
        for waiting_id in history.waiting:
            history.book.abandon(waiting_id)
        history.book.check()
        assert all(
            (v.reserved_tokens, v.reserved_bytes, v.queued) == (0, 0, 0) for v in history.book.view(history.tick * TICK)
        )

    run()


def test_a_request_after_retry_after_is_admitted_though_others_flood(examples):
    """Nobody is refused twice whose place was held: whatever others ask for meanwhile, in its class or in another."""
    sizes = st.one_of(st.integers(1, 300), st.integers(300, 1500))
    others = st.tuples(st.integers(1, 24), st.sampled_from(["a", "b"]), sizes, st.integers(0, 40))

    @settings(max_examples=examples(1500))
    @given(st.lists(others, min_size=20, max_size=100), sizes)
    def run(flood, tokens):
        book, tick, told_at = ledger(), 0, None
        for ticks, name, other_tokens, session in flood:
            tick += ticks
            serve(book, tick)
            book.reserve(name, f"other{session}", other_tokens, 0, tick * TICK)
            if told_at is None:
                decision = book.reserve("a", "mine", tokens, 0, tick * TICK)
                held = "mine" in book._lanes["a"].promises
                told_at = tick + 16 * decision.retry_after_s if isinstance(decision, Refused) and held else None
                if isinstance(decision, Waiting):
                    book.abandon(decision.id)
            elif tick >= told_at:
                assert_admitted(book, "a", "mine", tokens, tick)
                return

    run()


def test_whoever_was_told_a_time_is_let_in_when_it_comes(examples):
    """Held or not, and however many others come too: it waits as long as that needs, and is not told another time."""
    sizes = st.one_of(st.integers(1, 300), st.integers(300, 1500))
    others = st.tuples(st.integers(0, 24), sizes, st.integers(0, 12))

    @settings(max_examples=examples(1500))
    @given(st.lists(others, min_size=20, max_size=100))
    def run(flood):
        book, tick, told, waiting = ledger(A), 0, {}, {}
        for ticks, tokens, session in flood:
            for _ in range(ticks):
                tick += 1
                admit(book, tick, told, waiting)
            if session in [each for each, _ in waiting.values()]:
                continue
            comes = session in told and 0 <= tick - told[session] <= 16 * 9
            decision = book.reserve("a", session, tokens, 0, tick * TICK)
            if isinstance(decision, Waiting):
                waiting[decision.id] = session, comes
            else:
                end(book, decision, tick, told, session, comes)
        for later in range(16 * 600):
            if waiting:
                admit(book, tick + later, told, waiting)
        assert not waiting
        book.check()

    def admit(book, tick, told, waiting):
        for key, decision in book.admit(tick * TICK):
            end(book, decision, tick, told, *waiting.pop(key))

    def end(book, decision, tick, told, session, comes):
        if isinstance(decision, Refused):
            assert not comes, "it came when it was told to, and is told another time"
            told[session] = tick + 16 * decision.retry_after_s
        else:
            told.pop(session, None)
            book.settle(decision.ticket, decision.ticket.tokens, tick * TICK)
            book.close(decision.ticket, tick * TICK)

    run()


@pytest.mark.parametrize("returning", [0, 10])
def test_a_flood_that_does_not_come_back_pushes_no_turn_far_away(returning):
    """Thousands are refused and gone; Retry-After stays short, and whoever does return is let in."""
    book, tick = ledger(A, spare_s=0.0), 0
    told = {}
    for tick in range(16 * 40):
        serve(book, tick)
        for place in range(10):
            decision = book.reserve("a", f"{tick}-{place}", 32, 0, tick * TICK)
            told |= {f"{tick}-{place}": decision.retry_after_s} if isinstance(decision, Refused) else {}
    assert len(told) > 5000
    assert max(told.values()) <= A.queue_wait_s + HELD_S + 2
    refused = book.reserve("a", "mine", 100, 0, tick * TICK)
    for later in range(tick, tick + 16 * refused.retry_after_s):
        serve(book, later)
        book.reserve("a", f"more-{later}", 32, 0, later * TICK)
    tick += 16 * refused.retry_after_s
    for place in range(returning):  # some of the others return at the same time
        assert not isinstance(book.reserve("a", f"{16 * 39}-{place}", 8, 0, tick * TICK), Refused)
    assert_admitted(book, "a", "mine", 100, tick)


def serve(book, tick):
    """Work that is admitted computes what it reserved, at once."""
    granted = [(key, each) for key, each in book.admit(tick * TICK) if isinstance(each, Granted)]
    for _, each in granted:
        book.settle(each.ticket, each.ticket.tokens, tick * TICK)
        book.close(each.ticket, tick * TICK)
    return [key for key, _ in granted]


def assert_admitted(book, name, session, tokens, tick):
    decision = book.reserve(name, session, tokens, 0, tick * TICK)
    assert not isinstance(decision, Refused)
    for later in range(16 * 4):
        if isinstance(decision, Granted) or decision.id in serve(book, tick + later):
            return
        book.reserve(name, f"new{later}", 100, 0, (tick + later) * TICK)
    pytest.fail("it waited in the queue until its end")


def test_retry_after_is_what_the_rate_needs():
    book = ledger(A)
    drain(book, "a")
    decision = book.reserve("a", "s", 64 * 3, 0, 0.0)  # needs a full bucket of 128: 2 s
    assert isinstance(decision, Waiting)
    book.abandon(decision.id)
    book.reserve("a", "t", 128, 0, 0.0)
    book.reserve("a", "t2", 120, 0, 0.0)
    assert book.reserve("a", "u", 64, 0, 0.0) == Refused(5)  # 128 + 120 before it, 64 of its own, at 64 a second
    assert book.reserve("a", "u", 64, 0, 0.5) == Refused(5), "told again, a session keeps its place"
    assert book.reserve("a", "v", 64, 0, 0.5) == Refused(6), "the next is told to come later"


def test_a_flood_in_one_class_costs_another_nothing():
    """b floods for a minute; a, silent until then, finds its whole bucket, and its whole rate from then on."""
    book = ledger()
    for tick in range(960):
        serve(book, tick)
        book.reserve("b", f"s{tick}", 64, 0, tick * TICK)
    now = 60.0
    assert level(book, "a", now) == 128
    taken = 0
    for second in range(20):
        while isinstance(decision := book.reserve("a", "mine", 16, 0, now + second), Granted):
            taken += 16
            book.settle(decision.ticket, 16, now + second)
            book.close(decision.ticket, now + second)
        if isinstance(decision, Waiting):
            book.abandon(decision.id)
    assert taken >= 128 + 64 * 19


def test_unused_budget_is_lent_and_no_more_than_the_spare():
    book = ledger()
    alone = ledger(B)
    for each in (book, alone):
        drain(each, "b", now=30.0)
    taken = {"shared": 0, "alone": 0}
    for tick in range(16 * 30, 16 * 60):
        for key, each in (("shared", book), ("alone", alone)):
            while isinstance(decision := each.reserve("b", "s", 8, 0, tick * TICK), Granted):
                taken[key] += 8
                each.close(decision.ticket, tick * TICK)
            if isinstance(decision, Waiting):
                each.abandon(decision.id)
    assert taken["alone"] == pytest.approx(32 * 30, abs=16)
    assert taken["shared"] == pytest.approx((32 + 64) * 30, abs=16), "what a does not use, b may"
    assert level(book, "a", 60.0) == 128


def test_a_class_that_does_not_borrow_lives_on_its_own():
    alone = replace(B, borrows=False)
    book = ledger(A, alone)
    drain(book, "b", now=30.0)
    waiting = book.reserve("b", "s", 32, 0, 30.0)
    assert isinstance(waiting, Waiting)
    book.abandon(waiting.id)
    assert book.reserve("b", "s", 16, 0, 30.5).ticket.tokens == 16
    assert book.reserve("b", "t", 0, 10**9, 30.5).ticket.bytes == B.resident_bytes
    book.check()


def test_underestimated_work_is_a_debt_and_overestimated_is_given_back():
    book = ledger(A, spare_s=0.0)
    ticket = book.reserve("a", "s", 100, 0, 0.0).ticket
    book.settle(ticket, 10, 0.0)
    assert level(book, "a") == 118
    book.close(ticket, 0.0)
    ticket = book.reserve("a", "s", 118, 0, 0.0).ticket
    book.settle(ticket, 118 + 128, 0.0)
    assert level(book, "a") == -128
    book.close(ticket, 0.0)
    decision = book.reserve("a", "s", 64, 0, 0.0)
    assert isinstance(decision, Waiting)
    assert book.admit(2.9) == []
    assert [key for key, _ in book.admit(3.0)] == [decision.id]


def test_a_ticket_is_settled_once():
    book = ledger()
    ticket = book.reserve("a", "s", 10, 0, 0.0).ticket
    book.settle(ticket, 10, 0.0)
    with pytest.raises(AssertionError):
        book.settle(ticket, 10, 0.0)


def test_bytes_own_first_then_shared_and_never_anothers():
    book = ledger()
    first = book.reserve("b", "s1", 1, 500, 0.0)
    shared = book.reserve("b", "s2", 1, 300, 0.0)
    assert isinstance(first, Granted)
    assert isinstance(shared, Granted)
    assert not isinstance(book.reserve("b", "s3", 1, 1, 0.0), Granted)
    assert isinstance(book.reserve("a", "s4", 1, 1000, 0.0), Granted)
    assert not isinstance(book.reserve("a", "s5", 1, 1, 0.0), Granted), "the shared bytes are taken"
    book.close(shared.ticket, 1.0)
    assert isinstance(book.reserve("a", "s6", 1, 1, 1.0), Granted)
    assert isinstance(book.reserve("b", "s7", 1, 299, 1.0), Granted)
    book.check()


def test_bytes_that_run_out_wait_for_a_release():
    book = ledger(A, shared=0)
    first = book.reserve("a", "s1", 1, 1000, 0.0)
    book.close(first.ticket, 2.0)  # such requests hold their bytes for about so long
    running = book.reserve("a", "s2", 1, 1000, 2.0)
    refused = book.reserve("a", "s3", 1, 1000, 2.0)
    assert isinstance(refused, Refused)
    assert 9 <= refused.retry_after_s <= 10
    waiting = book.reserve("a", "s4", 1, 1000, 8.5)
    assert isinstance(waiting, Waiting)
    assert book.admit(9.0) == []
    book.close(running.ticket, 9.5)
    assert [key for key, _ in book.admit(9.5)] == [waiting.id]


def test_a_request_larger_than_all_bytes_runs_alone():
    book = ledger()
    decision = book.reserve("a", "s", 1, 10**9, 0.0)
    assert isinstance(decision, Granted)
    assert decision.ticket.bytes == 1300
    book.check()


def test_queue_is_bounded_first_come_first_served():
    book = ledger(A, shared=0)
    drain(book, "a")
    decisions = [book.reserve("a", f"s{i}", 32, 0, 0.0) for i in range(6)]
    assert [each.position for each in decisions[:4]] == [0, 1, 2, 3]
    assert all(isinstance(each, Refused) for each in decisions[4:])
    assert book.next_at(0.0) == pytest.approx(0.05)
    assert [key for key, _ in book.admit(1.0)] == [decisions[0].id, decisions[1].id]
    assert [key for key, _ in book.admit(2.0)] == [decisions[2].id, decisions[3].id]
    assert book.next_at(2.0) is None
