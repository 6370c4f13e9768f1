"""How pieces come into memory: pages, readers, placing, and which weights are there when."""
