"""The tests; a package so that helpers are imported as `tests.<folder>.<module>`."""
