"""One process group per world size, started when a test first needs it and kept for all tests."""

from collections.abc import Callable, Iterator

import pytest

from parallel.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    worlds: dict[int, World] = {}

    def of(size: int) -> World:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = World(size)
        return worlds[size]

    yield of
    for started in worlds.values():
        started.close()
