"""How property tests run: without a deadline, since a loaded machine is not a defect."""

from hypothesis import settings

settings.register_profile("tierlog", deadline=None, print_blob=True)
settings.load_profile("tierlog")
