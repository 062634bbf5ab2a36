"""What holds for every test: Hypothesis draws the same cases each time and has no stopwatch."""

import os

from hypothesis import settings

# Test processes side by side have a core each: threads of torch would only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("shoestring", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shoestring")
