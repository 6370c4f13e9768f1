"""Image processors, one file for each kind of steps; `registry.py` maps the classes of transformers to them."""
