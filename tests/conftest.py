"""Shared fixtures: large counts on demand, and real endpoints that tests share."""

from collections.abc import Callable

import pytest
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run large counts whole and with fresh seeds")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.register_profile("soak", deadline=None)
    settings.load_profile("soak" if config.getoption("--soak") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="large: runs under --soak"))


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`examples(n)`: n under --soak, a tenth of it otherwise."""
    soak = bool(request.config.getoption("--soak"))
    return lambda n: n if soak else max(1, n // 10)
