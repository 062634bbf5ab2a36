"""What a run does, as it does it: events in files, and what a launcher shows of them."""
