"""Shared fixtures: large counts on demand, and real endpoints that tests share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Helpers stand beside the tests; import-mode importlib leaves it to us that they are found.
sys.path.insert(0, str(Path(__file__).parent))

import endpoint as endpoints

SOAK_TIMEOUT_S = 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run large counts whole and with fresh seeds")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.register_profile("soak", deadline=None)
    settings.load_profile("soak" if config.getoption("--soak") else "ci")
    if config.getoption("--soak"):  # it takes an hour: say what is running, and what took long
        config.option.verbose = 1
        config.option.durations = config.option.durations or 40


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))
        return
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="large: runs under --soak"))


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`examples(n)`: n under --soak, a tenth of it otherwise."""
    soak = bool(request.config.getoption("--soak"))
    return lambda n: n if soak else max(1, n // 10)


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints what large counts came to: past the capture of output under --soak, as `print` otherwise."""
    if not request.config.getoption("--soak"):
        return print
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None

    def print_at_once(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(text, flush=True)

    return print_at_once


@pytest.fixture(scope="session")
def endpoint() -> Iterator[endpoints.Endpoint]:
    """One endpoint for all tests that leave it as they found it."""
    with endpoints.short_folder() as folder, endpoints.running(folder) as running:
        yield running
