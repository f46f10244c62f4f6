"""Keeps what there is as it is wanted: decides, acts, and remembers for the next controller."""
