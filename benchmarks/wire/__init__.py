"""What rounds cost over slow links, and what a shard and a worker cost by themselves."""
