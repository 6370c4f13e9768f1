"""Requests, scheduling, cache, sampling, the engine and its host."""
