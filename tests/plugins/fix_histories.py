"""The judge of histories, built once."""

import pytest

from tests.histories.checker import Checker, CheckerMissingError


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    try:
        return Checker.build(tmp_path_factory.mktemp("judge"))
    except CheckerMissingError as missing:
        pytest.skip(str(missing))
