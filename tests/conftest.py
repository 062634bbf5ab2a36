"""What holds for every test: Hypothesis draws the same cases each time and has no stopwatch."""

from hypothesis import settings

settings.register_profile("shoestring", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shoestring")
