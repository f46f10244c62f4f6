"""Model loading, paged attention, sampling, step execution. Knows no requests; torch lives here."""
