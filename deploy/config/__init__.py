"""The config at the edge: where values come from, what is unwise, the pages made from it."""
