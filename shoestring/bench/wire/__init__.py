"""What a round costs, beside gloo's all-reduce."""
