"""What the tests of the integrations share."""

import random

import pytest


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Draws for this test: other ones in each run, unless in CI or with --seed."""
    return random.Random(f"{request.config.getoption('seed')} {request.node.nodeid}")
