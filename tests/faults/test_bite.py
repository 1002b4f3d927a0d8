"""The troubles at every call find what they are there for: each defect is seen, and as itself."""

import re

import pytest

from tests.faults.defects import DEFECTS, found_by


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name):
    defect = DEFECTS[name]
    found = found_by(defect)
    assert found is not None, "nothing was found"
    point, ending = found
    assert (point is None) == defect.at_once, (point, ending.broken)
    assert re.search(defect.says, "\n".join(ending.broken)), (point, ending.broken)
