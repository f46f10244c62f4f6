"""Looks for what would stop a deployment: at its config, and at the machine by moving bytes."""
