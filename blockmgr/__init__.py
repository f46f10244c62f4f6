"""Who owns a KV block, and until when: pools, states, fences, prefix sharing. Knows no bytes."""
