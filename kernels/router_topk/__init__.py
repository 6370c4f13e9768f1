"""The choice of experts from router logits."""
