"""One job on devices of unequal speed."""
