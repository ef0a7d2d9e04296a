"""The demonstration: one real training by four ranks, one of them late and the links thin, four times over."""
