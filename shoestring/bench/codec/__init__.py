"""What codecs cost and save."""
