"""One embedded Ray session for all tests of this directory: starting one costs more than most of them."""

from collections.abc import Iterator

import pytest

from cure_ray.cluster.session import Session, session


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Session]:
    with session(cpus=2) as opened:
        yield opened
