"""Facts that ship with the package: devices, links and the configurations of released models."""
