"""Models: frozen specs, families, blocks, and the stack built from them."""
