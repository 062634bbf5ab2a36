"""`shoestring demo`: one training twice over a slow link."""
