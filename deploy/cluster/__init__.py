"""Ray, of its own or one that runs, with the processes and signals around it."""
