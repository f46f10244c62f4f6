"""What the commands do that have no room of their own: serving, changing, looking."""
