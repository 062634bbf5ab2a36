"""What a follower costs the run it reads."""
