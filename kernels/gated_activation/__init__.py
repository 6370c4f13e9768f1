"""The elementwise half of a gated feed-forward: activation(gate) * up."""
