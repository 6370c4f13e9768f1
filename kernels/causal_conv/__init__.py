"""Short causal convolutions, one filter a channel, over sequences that keep their last inputs."""
