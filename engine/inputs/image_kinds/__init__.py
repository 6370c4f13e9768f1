"""What image processors do, one file a kind of steps; `registry.py` lists the classes of transformers by name."""
