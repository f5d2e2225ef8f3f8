"""Language models: scheduling, KV cache, sampling and text."""
