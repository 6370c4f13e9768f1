"""The face: bring-up sessions, rungs, reports, telemetry, runs and the command line."""
