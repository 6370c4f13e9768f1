"""How pieces get into memory: page allocation, readers, placement and residency."""
