"""The OpenAI API in front of both fleets."""
