"""The simulation bites: defects of the kinds that the design forbids break a rule."""

import pytest

from tests.simulation.mutants import MUTANTS, hunt

SEEDS_MAX = 10


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_caught(name):
    assert hunt(MUTANTS[name], seeds_max=SEEDS_MAX, ledgers=30) is not None
