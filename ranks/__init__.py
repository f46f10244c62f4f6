"""Several processes that are one worker: each holds its part of every layer and of every block."""
