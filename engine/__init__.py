"""The model process: a synchronous, paged, prefix-caching inference engine."""
