"""One request in time: lanes, as a picture or in the terminal."""
