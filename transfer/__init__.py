"""How KV crosses between workers: tickets and leases, the reader, UCX. Knows no tokens."""
