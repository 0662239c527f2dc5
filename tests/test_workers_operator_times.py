"""Operators are timed from outside: each without those inside it, and their functions are as they were afterwards."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from forebay.workers.operator_times import Operators, OperatorTimes


def test_an_operator_takes_what_those_inside_it_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second: a call takes one, and two more for each call inside it."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    code = SimpleNamespace(
        inner=lambda x: x + 1,
        outer=lambda x: code.inner(code.inner(x)),
        other=lambda: None,
        whole=lambda: (code.outer(1), code.other()),
    )
    before = dict(vars(code))
    operators = Operators(
        places={
            "step": ((code, "whole"),),
            "layer": ((code, "outer"), (code, "other")),
            "heart": ((code, "inner"),),
        },
        inside={"layer": "step", "heart": "layer"},
    )
    times = OperatorTimes(operators, torch.device("cpu"), in_graph=False)
    with times.watching():
        code.other()
        times.restart()
        assert code.whole() == (3, None)
    assert vars(code) == before
    assert times.ms() == {"step": 9000 - 6000, "layer": 6000 - 2000, "heart": 2000}


def test_the_second_of_two_equal_steps_can_be_kept() -> None:
    code = SimpleNamespace(step=lambda: None)
    operators = Operators(places={"step": ((code, "step"),)}, inside={})
    times = OperatorTimes(operators, torch.device("cpu"), in_graph=False)
    with times.watching():
        code.step()
        code.step()
    both = times.ms()["step"]
    times.keep_last_half()
    assert 0 <= times.ms()["step"] < both


def test_functions_come_back_after_an_error_too() -> None:
    def fails() -> None:
        raise ValueError("as planned")

    code = SimpleNamespace(step=fails)
    operators = Operators(places={"step": ((code, "step"),)}, inside={})
    with pytest.raises(ValueError, match="planned"), OperatorTimes(operators, torch.device("cpu"), False).watching():
        code.step()
    assert code.step is fails
