"""`shoestring bench train`: the same training, the same link, one contestant after another."""
