"""The command line: what each command takes, and which room carries it out."""
