"""The decode fleet: reads KV, runs the batch, streams tokens."""
