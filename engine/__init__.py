"""From a checkpoint to a running, sharded model: usable without notebooks."""
