"""Starts, watches and stops everything: the command line, Ray, the demo."""
