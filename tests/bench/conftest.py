"""One small engine for all measurements, over the model whose tokens are known by hand."""

import pytest

from tests.fakes import fake_engine


@pytest.fixture(scope="session")
def shared_engine():
    return fake_engine()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    assert not shared_engine.has_unfinished_requests()
    shared_engine.reset_prefix_cache()
    shared_engine.check_integrity()
