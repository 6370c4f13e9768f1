"""Matrix products grouped by expert, and the expert layer built from them."""
