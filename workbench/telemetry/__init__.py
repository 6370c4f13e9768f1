"""Telemetry sources: readings with a value or the reason there is none, one file each."""
