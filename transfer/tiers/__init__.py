"""Moves blocks between a worker's pool, its host memory and storage. Decides nothing."""
