"""How property tests run: without a deadline, since a loaded machine is not a defect.

In CI the examples are the same in each run, so that a change is judged by its own doing; `make
soak` and every run by hand draw fresh ones.
"""

import os

from hypothesis import settings

settings.register_profile("tierlog", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tierlog")
