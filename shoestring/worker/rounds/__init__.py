"""When and how values travel: sync policies, and what becomes a round."""
