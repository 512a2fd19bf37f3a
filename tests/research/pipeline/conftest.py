"""Modules marked `devices` run in the process with eight devices, as those of tests/sharding."""

from tests.sharding.conftest import (  # noqa: F401
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_unconfigure,
)
