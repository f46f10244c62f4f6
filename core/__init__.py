"""What every Sluice package shares: ids, messages, KV layout, config, errors, logging, metrics."""
