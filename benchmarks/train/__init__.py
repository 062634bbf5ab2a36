"""The same training over the same link, beside what others offer."""
